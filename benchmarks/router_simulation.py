"""A thousand replicas and a million users: what the router's choices do to cache hits and to waiting.

    python benchmarks/router_simulation.py [--users 1000000] [--replicas 1000] [--write]

A model of events and no engine: it leaves out steps, blocks and preemption, and says what a replica does in
three numbers (see Replica). The choices are those of the real jax_paged.core.replicas.router.ReplicaRouter,
which is told what a router is told: that a request begins, and that it has ended. Nothing here was measured
on a GPU: the three numbers are arithmetic, for a model of 8B parameters on an H100 (docs/scale.md).

Users come at random times over the period. Each has a conversation, of an application: its system prompt
comes first, then turns, in which the prompt is all of the conversation so far. One in three begins with a
document. All policies see the same users, who say the same at their own pace once they have been answered.

Printed, and with --write kept in results/, is a line per policy: the share of prompt tokens that was cached,
how long users waited for the first token, and how many turns went where the turn before was. The lags are
compared with a tenth of replicas and users.
"""

import argparse
import collections
import dataclasses
import heapq
import json
import subprocess
from array import array
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jax_paged.core.replicas.router import MAX_LAG, ReplicaRouter

RESULTS = Path(__file__).parent / "results"
NAME = "router-simulation-2026-11-23"
QUANTILES = (0.5, 0.9, 0.99, 0.999)
LAGS = (0, 4, 8, 16, 32, 64)
NUM_APPLICATIONS = 300
USERS_PER_SECOND_AND_REPLICA = 1.9
MAX_TURNS = 12

# Of a model of 8B parameters (16 GB of weights, 131,072 bytes of keys and values per token) on an H100, at
# 40% of its 990 TFLOP/s and 80% of its 3.35 TB/s.
PREFILL_S_PER_TOKEN = 40e-6
STEP_S = 6e-3
STEP_S_PER_SEQUENCE = 0.1e-3  # 2,000 tokens of context
NUM_SEATS = 256
CACHE_TOKENS = 400_000


@dataclasses.dataclass(frozen=True)
class Users:
    """What users say, one entry per user, or MAX_TURNS per user in those of turns.

    Args:
        arrival: Seconds at which they come.
        application: Whose system prompt they see.
        num_turns: How often they ask.
        num_new: Tokens that each turn adds, of the first turn beside the system prompt.
        num_output: Tokens of each answer.
        think_s: Seconds between an answer and the next turn.
        system: Tokens of each application's system prompt.
    """

    arrival: array
    application: array
    num_turns: array
    num_new: array
    num_output: array
    think_s: array
    system: list[int]


def make_users(num: int, period_s: float) -> Users:
    """Returns users that come over a period; the same for all policies."""
    draw = np.random.default_rng(0)
    popularity = 1 / np.arange(1, NUM_APPLICATIONS + 1)
    new = np.clip(draw.lognormal(np.log(100), 0.8, (num, MAX_TURNS)), 5, 4000)
    documents = np.clip(draw.lognormal(np.log(4000), 0.6, num), 500, 20_000)
    new[:, 0] += np.where(draw.random(num) < 1 / 3, documents, 0)
    applications = draw.choice(NUM_APPLICATIONS, num, p=popularity / popularity.sum())
    outputs = np.clip(draw.lognormal(np.log(200), 0.7, new.shape), 5, 2000)
    return Users(
        arrival=_array("d", np.sort(draw.uniform(0, period_s, num))),
        application=_array("i", applications),
        num_turns=_array("i", np.minimum(draw.geometric(1 / 4, num), MAX_TURNS)),
        num_new=_array("i", new),
        num_output=_array("i", outputs),
        think_s=_array("f", draw.lognormal(np.log(20), 0.7, new.shape)),
        system=draw.integers(200, 4000, NUM_APPLICATIONS).tolist(),
    )


def _array(kind: str, values: np.ndarray) -> array:
    """Returns numbers as Python reads them quickly one by one."""
    return array(kind, values.astype(kind).tobytes())


class Replica:
    """An engine in three numbers: prompts are computed one after the other, answers side by side.

    A turn waits for a batch slot, then for the prompts before its own. Its own takes as long as it has tokens
    that are not cached; a token of its answer takes as long as a step of as many sequences as run when it
    begins. Conversations and system prompts stay cached until others, used later, have filled the pool.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.waiting: collections.deque[tuple[int, int]] = collections.deque()
        self._prefill_ends = 0.0
        self._cached: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._num_cached = 0

    def begin(self, now: float, user: int, application: int, num_system: int, num_tokens: int) -> int:
        """Computes a prompt; returns how many of its tokens were cached."""
        shared = self._use(-1 - application, num_system)
        own = self._use(user, num_tokens - num_system) if shared else 0
        num_cached = min(shared + own, num_tokens - 1)
        self._prefill_ends = max(now, self._prefill_ends) + (num_tokens - num_cached) * PREFILL_S_PER_TOKEN
        return num_cached

    def times(self, num_output: int) -> tuple[float, float]:
        """Returns when the last prompt that was begun has its first token, and its last."""
        step_s = STEP_S + self.num_running * STEP_S_PER_SEQUENCE
        return self._prefill_ends + step_s, self._prefill_ends + num_output * step_s

    def keep(self, user: int, num_tokens: int) -> None:
        """Adds an answer to what is cached of a conversation."""
        if user in self._cached:
            self._use(user, num_tokens)

    def _use(self, key: int, num_tokens: int) -> int:
        """Returns how much of something was cached; all of it is from now on."""
        found = self._cached.pop(key, 0)
        self._cached[key] = num_tokens
        self._num_cached += num_tokens - found
        while self._num_cached > CACHE_TOKENS:
            self._num_cached -= self._cached.popitem(last=False)[1]
        return found


class RememberingRouter(ReplicaRouter):
    """Finds each home once: they stay, as no replica comes or goes here."""

    def __init__(self, num_replicas: int, max_lag: int) -> None:
        super().__init__(map(str, range(num_replicas)), max_lag)
        self._homes: dict[str, str] = {}

    def home(self, prefix_key: str) -> str:
        """Returns what ReplicaRouter.home does."""
        if (found := self._homes.get(prefix_key)) is None:
            found = self._homes[prefix_key] = super().home(prefix_key)
        return found


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a policy has come to.

    Args:
        policy: Its name.
        num_requests: Turns that were answered.
        hit_share: Share of the prompts' tokens that were cached.
        home_share: Of the turns behind a first one, the share that went where the turn before was.
        prefill_share: Share of the replicas' time in which they computed prompts.
        most_loaded: The highest load of a replica, seen every 1,000 requests once
            a quarter of the users has come, over the mean of all then.
        first_token_s: Quantiles of the seconds until the first token, by the quantile.
    """

    policy: str
    num_requests: int
    hit_share: float
    home_share: float
    prefill_share: float
    most_loaded: float
    first_token_s: dict[str, float]


def simulate(users: Users, num_replicas: int, policy: str, max_lag: int) -> tuple[Outcome, np.ndarray]:
    """Runs all users; returns the outcome, and the seconds of every turn until its first token, sorted.

    Args:
        users: Who comes.
        num_replicas: How many there are.
        policy: "round robin", "least loaded" or "home".
        max_lag: As ReplicaRouter takes it.
    """
    router, replicas = RememberingRouter(num_replicas, max_lag), [Replica() for _ in range(num_replicas)]
    num_users, waits = len(users.arrival), array("f")
    turn, size, place = (array("i", [0]) * num_users for _ in range(3))
    asked_at = array("d", [0.0]) * num_users
    events: list[tuple[float, int, int]] = []  # seconds; 0 for a question, 1 for the end of an answer; user
    num_tokens = num_cached = num_moved = num_later = num_come = 0
    most_loaded, end = 0.0, 0.0
    num_asked, names = 0, list(router.replica_ids)
    bar = tqdm(total=num_users, unit="user", desc=policy, unit_scale=True, mininterval=1)

    def begin(now: float, user: int, at: int) -> None:
        nonlocal num_tokens, num_cached
        replica, application = replicas[at], users.application[user]
        replica.num_running += 1
        if policy != "round robin":
            router.begin(names[at])
        num_cached += replica.begin(now, user, application, users.system[application], size[user])
        num_tokens += size[user]
        first, last = replica.times(users.num_output[user * MAX_TURNS + turn[user]])
        waits.append(first - asked_at[user])
        heapq.heappush(events, (last, 1, user))

    while events or num_come < num_users:
        if num_come < num_users and (not events or users.arrival[num_come] <= events[0][0]):
            user, now, what = num_come, users.arrival[num_come], 0
            size[user] = users.system[users.application[user]]
            num_come += 1
        else:
            now, what, user = heapq.heappop(events)
        if what == 0:
            size[user] += users.num_new[user * MAX_TURNS + turn[user]]
            asked_at[user] = now
            num_asked += 1
            key = None if policy == "least loaded" else str(user)
            at = num_asked % num_replicas if policy == "round robin" else int(router.choose(key))
            if turn[user]:
                num_later += 1
                num_moved += place[user] != at
            place[user] = at
            if replicas[at].num_running < NUM_SEATS:
                begin(now, user, at)
            else:
                replicas[at].waiting.append((user, at))
            if num_asked % 1000 == 0 and num_users / 4 < num_come < num_users:  # neither filling nor emptying
                loads = [r.num_running + 4 * len(r.waiting) for r in replicas]
                most_loaded = max(most_loaded, max(loads) / (sum(loads) / num_replicas))
            continue
        at, end = place[user], now
        if policy != "round robin":
            router.finish(names[at])
        replicas[at].num_running -= 1
        size[user] += users.num_output[user * MAX_TURNS + turn[user]]
        replicas[at].keep(user, size[user] - users.system[users.application[user]])
        if replicas[at].waiting:
            begin(now, *replicas[at].waiting.popleft())
        turn[user] += 1
        if turn[user] < users.num_turns[user]:
            heapq.heappush(events, (now + users.think_s[user * MAX_TURNS + turn[user]], 0, user))
        else:
            bar.update()
    bar.close()
    seconds = np.sort(np.frombuffer(waits, np.float32))
    quantiles = {str(q): float(np.quantile(seconds, q)) for q in QUANTILES}
    busy = (num_tokens - num_cached) * PREFILL_S_PER_TOKEN / (num_replicas * end)
    name = f"home, lag {max_lag}" if policy == "home" else policy
    shares = num_cached / num_tokens, 1 - num_moved / num_later, busy, most_loaded
    return Outcome(name, len(seconds), *shares, quantiles), seconds


def table(outcomes: list[Outcome]) -> str:
    """Returns the outcomes as a table in Markdown."""
    rows = [
        "| policy | prompt tokens cached | turns at home | prefill busy | fullest replica / mean | "
        "first token p50, s | p90 | p99 | p99.9 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for x in outcomes:
        shares = f"{x.hit_share:.1%} | {x.home_share:.1%} | {x.prefill_share:.1%} | {x.most_loaded:.2f}"
        seconds = " | ".join(f"{s:.3f}" for s in x.first_token_s.values())
        rows.append(f"| {x.policy} | {shares} | {seconds} |")
    return "\n".join(rows)


def draw(outcomes: list[Outcome], seconds: list[np.ndarray], path: Path) -> None:
    """Draws each policy's share of cached tokens, and of turns that waited longer than so many seconds."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "router"  # the same bytes each time
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    bars, tails = figure.subplots(1, 2, width_ratios=[1, 1.6])
    names = [outcome.policy for outcome in outcomes]
    for i, (outcome, waits) in enumerate(zip(outcomes, seconds, strict=True)):
        bars.barh(i, 100 * outcome.hit_share, color=f"C{i}")
        text = f"{outcome.hit_share:.0%}"
        bars.text(100 * outcome.hit_share - 2, i, text, va="center", ha="right", color="w")
        left = np.geomspace(1, 1 / len(waits), 200)
        tails.plot(np.quantile(waits, 1 - left), left, color=f"C{i}", label=names[i])
    bars.set_yticks(range(len(names)), names)
    bars.invert_yaxis()
    bars.set_xlabel("prompt tokens found in a cache, %")
    tails.set(xscale="log", yscale="log", ylim=(1e-5, 1), xlabel="seconds until the first token, log scale")
    tails.set_ylabel("share of turns that wait longer, log scale")
    tails.legend(frameon=False)
    for axes in (bars, tails):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Prints the tables, and writes them with --write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help=f"whether to write results/{NAME}.*")
    args = parser.parse_args()
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
    period_s = args.users / (USERS_PER_SECOND_AND_REPLICA * args.replicas)
    users, few = make_users(args.users, period_s), make_users(args.users // 10, period_s)
    lags = [simulate(few, args.replicas // 10, "home", lag)[0] for lag in LAGS]
    policies = ("round robin", "least loaded", "home")
    runs = [simulate(users, args.replicas, policy, MAX_LAG) for policy in policies]
    outcomes = [outcome for outcome, _ in runs]
    print(table(outcomes), table(lags), sep="\n\n")
    if args.write:
        draw(outcomes, [seconds for _, seconds in runs], RESULTS / f"{NAME}.svg")
        facts = {
            "commit": commit.strip(),
            "users": args.users,
            "replicas": args.replicas,
            "seconds": period_s,
        }
        tables = {"policies": outcomes, "lags": lags}
        kept = facts | {name: [*map(dataclasses.asdict, found)] for name, found in tables.items()}
        (RESULTS / f"{NAME}.json").write_text(json.dumps(kept, indent=1) + "\n")
        (RESULTS / f"{NAME}.md").write_text(
            "# The router, simulated\n\n"
            f"Commit {facts['commit']}. `python benchmarks/router_simulation.py`: "
            f"{args.users:,} users who come within {period_s:.0f} s, {args.replicas:,} replicas,\n"
            f"{outcomes[0].num_requests:,} turns. A model; nothing of it ran on a GPU: see the script.\n\n"
            f"![Cached share and waiting, by policy]({NAME}.svg)\n\n{table(outcomes)}\n\n"
            f"## Lags, with a tenth of replicas and users\n\n{table(lags)}\n"
        )


if __name__ == "__main__":
    main()
