"""Simulation of the router with 1,000 replicas and a million users: cache hits and waiting times.

    python benchmarks/router_simulation.py [--users 1000000] [--replicas 1000] [--write]

This is a discrete-event simulation. It has no engines, steps, blocks or preemption; three constants describe
the speed of a replica (see Replica). The real jax_paged.core.replicas.router.ReplicaRouter chooses the
replicas. As in a server, it is called when a request begins and when a request ends. Nothing was measured on
a GPU: the constants are calculated for a model of 8B parameters on an H100 (docs/scale.md).

Users arrive at random times. Each user has one conversation with one application. A turn is a message of the
user and its answer. The first prompt is the application's system prompt and the first message; each later
prompt contains the whole conversation so far.
A third of the conversations begin with a document. Users, messages and the times between an answer and the
next message are the same for every policy.

The first table has a row per policy: the share of prompt tokens that were cached, the time to the first token
and the share of turns that went to the same replica as the previous turn. The second table compares values of
max_lag, with a tenth of the replicas and users: a request goes to its home replica if the load there is at
most max_lag higher than the lowest load. --write saves the tables and a picture in results/.
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

# For a model of 8B parameters (16 GB of weights, 131,072 bytes of keys and values per token) on an H100, at
# 40% of its 990 TFLOP/s and 80% of its 3.35 TB/s.
PREFILL_S_PER_TOKEN = 40e-6
STEP_S = 6e-3
STEP_S_PER_SEQUENCE = 0.1e-3  # the time to read 2,000 tokens of context
NUM_BATCH_SLOTS = 256
CACHE_TOKENS = 400_000


@dataclasses.dataclass(frozen=True)
class Users:
    """The simulated users and their conversations.

    Args:
        arrival: Arrival time of each user (seconds).
        application: Index of each user's application.
        num_turns: Number of turns of each user.
        num_new: New prompt tokens of each turn, without the system prompt [users * MAX_TURNS].
        num_output: Output tokens of each turn [users * MAX_TURNS].
        think_s: Time between the previous answer and each turn (seconds) [users * MAX_TURNS].
        system: Length of each application's system prompt (tokens).
    """

    arrival: array
    application: array
    num_turns: array
    num_new: array
    num_output: array
    think_s: array
    system: list[int]


def make_users(num: int, period_s: float) -> Users:
    """Returns `num` users who arrive during `period_s` seconds; equal arguments give equal users."""
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
    """Returns values as an array.array, because reading single elements of a NumPy array is slower."""
    return array(kind, values.astype(kind).tobytes())


class Replica:
    """Simulated engine, which computes prompts one after another and decodes all answers at the same time.

    A turn waits for a batch slot, then for the prompts that were started before its own. Its prompt takes
    PREFILL_S_PER_TOKEN for each token that is not cached. Each output token takes one decode step: STEP_S,
    and STEP_S_PER_SEQUENCE for each sequence that is running when the answer begins. Conversations and system
    prompts are cached; if the cache is full, the least recently used ones are evicted.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.waiting: collections.deque[tuple[int, int]] = collections.deque()
        self._prefill_ends = 0.0
        self._cached: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._num_cached = 0

    def begin(self, now: float, user: int, application: int, num_system: int, num_tokens: int) -> int:
        """Starts a prompt and returns the number of its cached tokens.

        Args:
            now: Current time (seconds).
            user: Index of the user.
            application: Index of the application.
            num_system: Length of the system prompt (tokens).
            num_tokens: Length of the whole prompt (tokens).
        """
        shared = self._use(-1 - application, num_system)
        own = self._use(user, num_tokens - num_system) if shared else 0
        num_cached = min(shared + own, num_tokens - 1)
        self._prefill_ends = max(now, self._prefill_ends) + (num_tokens - num_cached) * PREFILL_S_PER_TOKEN
        return num_cached

    def times(self, num_output: int) -> tuple[float, float]:
        """Returns the times of the first and the last output token of the prompt that was started last."""
        step_s = STEP_S + self.num_running * STEP_S_PER_SEQUENCE
        return self._prefill_ends + step_s, self._prefill_ends + num_output * step_s

    def keep(self, user: int, num_tokens: int) -> None:
        """Adds an answer to the cached conversation of a user.

        Args:
            user: Index of the user.
            num_tokens: Length of the conversation with the answer, without the system prompt (tokens).
        """
        if user in self._cached:
            self._use(user, num_tokens)

    def _use(self, key: int, num_tokens: int) -> int:
        """Caches an entry of `num_tokens` tokens and returns how many of them were cached before.

        Negative keys are system prompts, the others conversations.
        """
        found = self._cached.pop(key, 0)
        self._cached[key] = num_tokens
        self._num_cached += num_tokens - found
        while self._num_cached > CACHE_TOKENS:
            self._num_cached -= self._cached.popitem(last=False)[1]
        return found


class RememberingRouter(ReplicaRouter):
    """Router that computes each home only once. This is valid because no replica is added or removed."""

    def __init__(self, num_replicas: int, max_lag: int) -> None:
        super().__init__(map(str, range(num_replicas)), max_lag)
        self._homes: dict[str, str] = {}

    def home(self, prefix_key: str) -> str:
        """Returns the home replica of a prefix."""
        if (found := self._homes.get(prefix_key)) is None:
            found = self._homes[prefix_key] = super().home(prefix_key)
        return found


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Results of one policy.

    Args:
        policy: Name of the policy.
        num_requests: Number of turns.
        hit_share: Share of prompt tokens that were cached.
        home_share: Share of turns after the first that went to the same replica as the previous turn.
        prefill_share: Share of the replicas' time in which they computed prompts.
        most_loaded: Highest load of a replica divided by the mean load of all replicas at that time. Loads
            are compared every 1,000 requests, while more than a quarter of the users, but not all, have
            arrived.
        first_token_s: Quantiles of the time to the first token (seconds), by quantile.
    """

    policy: str
    num_requests: int
    hit_share: float
    home_share: float
    prefill_share: float
    most_loaded: float
    first_token_s: dict[str, float]


def simulate(users: Users, num_replicas: int, policy: str, max_lag: int) -> tuple[Outcome, np.ndarray]:
    """Simulates all users with one policy.

    Args:
        users: The users.
        num_replicas: Number of replicas.
        policy: "round robin", "least loaded" or "home".
        max_lag: The argument of ReplicaRouter.

    Returns:
        The outcome, and the sorted times to the first token of all turns (seconds).
    """
    router, replicas = RememberingRouter(num_replicas, max_lag), [Replica() for _ in range(num_replicas)]
    num_users, waits = len(users.arrival), array("f")
    # For each user: index of the turn, tokens of the conversation, and replica of the last turn.
    turn, context_len, replica_of = (array("i", [0]) * num_users for _ in range(3))
    asked_at = array("d", [0.0]) * num_users
    events: list[tuple[float, int, int]] = []  # time, 0 for a new turn or 1 for the end of an answer, user
    num_tokens = num_cached = num_moved = num_later = num_arrived = 0
    most_loaded, end = 0.0, 0.0
    num_asked, names = 0, list(router.replica_ids)
    bar = tqdm(total=num_users, unit="user", desc=policy, unit_scale=True, mininterval=1)

    def begin(now: float, user: int, at: int) -> None:
        nonlocal num_tokens, num_cached
        replica, application = replicas[at], users.application[user]
        replica.num_running += 1
        if policy != "round robin":
            router.begin(names[at])
        num_cached += replica.begin(now, user, application, users.system[application], context_len[user])
        num_tokens += context_len[user]
        first, last = replica.times(users.num_output[user * MAX_TURNS + turn[user]])
        waits.append(first - asked_at[user])
        heapq.heappush(events, (last, 1, user))

    while events or num_arrived < num_users:
        if num_arrived < num_users and (not events or users.arrival[num_arrived] <= events[0][0]):
            user, now, what = num_arrived, users.arrival[num_arrived], 0
            context_len[user] = users.system[users.application[user]]
            num_arrived += 1
        else:
            now, what, user = heapq.heappop(events)
        if what == 0:
            context_len[user] += users.num_new[user * MAX_TURNS + turn[user]]
            asked_at[user] = now
            num_asked += 1
            key = None if policy == "least loaded" else str(user)
            at = num_asked % num_replicas if policy == "round robin" else int(router.choose(key))
            if turn[user]:
                num_later += 1
                num_moved += replica_of[user] != at
            replica_of[user] = at
            if replicas[at].num_running < NUM_BATCH_SLOTS:
                begin(now, user, at)
            else:
                replicas[at].waiting.append((user, at))
            # Loads are not compared while users are few: at the beginning and at the end.
            if num_asked % 1000 == 0 and num_users / 4 < num_arrived < num_users:
                # The load as ReplicaRouter defines it.
                loads = [r.num_running + 4 * len(r.waiting) for r in replicas]
                most_loaded = max(most_loaded, max(loads) / (sum(loads) / num_replicas))
            continue
        at, end = replica_of[user], now
        if policy != "round robin":
            router.finish(names[at])
        replicas[at].num_running -= 1
        context_len[user] += users.num_output[user * MAX_TURNS + turn[user]]
        replicas[at].keep(user, context_len[user] - users.system[users.application[user]])
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
        "| policy | prompt tokens cached | turns at same replica | prefill busy | fullest replica / mean | "
        "first token p50, s | p90 | p99 | p99.9 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for x in outcomes:
        shares = f"{x.hit_share:.1%} | {x.home_share:.1%} | {x.prefill_share:.1%} | {x.most_loaded:.2f}"
        seconds = " | ".join(f"{s:.3f}" for s in x.first_token_s.values())
        rows.append(f"| {x.policy} | {shares} | {seconds} |")
    return "\n".join(rows)


def draw(outcomes: list[Outcome], seconds: list[np.ndarray], path: Path) -> None:
    """Draws the share of cached tokens and the distribution of the time to the first token for each policy.

    Args:
        outcomes: Results of the policies.
        seconds: Sorted times to the first token, for each policy.
        path: File of the picture.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "router"  # makes the bytes of the file reproducible
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
    """Runs the simulations, prints the tables and, with --write, saves them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help=f"write results/{NAME}.*")
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
            "# Simulation of the router\n\n"
            f"Commit {facts['commit']}. `python benchmarks/router_simulation.py`: "
            f"{args.users:,} users who arrive within {period_s:.0f} s, {args.replicas:,} replicas,\n"
            f"{outcomes[0].num_requests:,} turns. Nothing ran on a GPU: the script describes the model.\n\n"
            f"![Cached tokens and waiting time by policy]({NAME}.svg)\n\n{table(outcomes)}\n\n"
            f"## Values of max_lag, with a tenth of the replicas and users\n\n{table(lags)}\n"
        )


if __name__ == "__main__":
    main()
