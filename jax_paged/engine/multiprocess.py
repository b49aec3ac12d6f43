"""Executors whose devices belong to several processes."""

import json
import logging
import pickle
import socket
import subprocess
import sys
from typing import Any

import numpy as np

from jax_paged.config import EngineArgs, EngineConfig
from jax_paged.core.runner_output import ModelRunnerOutput
from jax_paged.core.scheduler_output import SchedulerOutput
from jax_paged.worker.channel import Channel
from jax_paged.worker.process import Task

_PROGRAM = """
import json, sys
sys.path, descriptor = json.loads(sys.argv[1])
from jax_paged.worker.process import main
main(descriptor)
"""


class MultiprocessExecutor:
    def __init__(self, args: EngineArgs) -> None:
        size = args.tensor_parallel_size
        pairs = [socket.socketpair() for _ in range(size - 1)]
        self._started = [self._start(args, 0, size, [a for a, _ in pairs])]
        self._started += [self._start(args, rank, size, [b]) for rank, (_, b) in enumerate(pairs, 1)]
        for pair in pairs:
            for end in pair:
                end.close()
        self._channel = self._started[0][1]
        self.config, self.buckets = self._reply()

    def _start(self, args, rank, size, peers):
        ours, theirs = socket.socketpair()
        with theirs:
            fds = [theirs.fileno(), *(peer.fileno() for peer in peers)]
            command = [sys.executable, "-c", _PROGRAM, json.dumps([sys.path, theirs.fileno()])]
            process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        channel = Channel(ours)
        task = Task(args, rank, size, tuple(fds[1:]), logging.getLogger().getEffectiveLevel())
        channel.send("task", [np.frombuffer(pickle.dumps(task), np.uint8)])
        return process, channel

    def _reply(self):
        value = pickle.loads(self._channel.receive()[1][0].data)
        if isinstance(value, BaseException):
            raise value
        return value

    def _send(self, name, *args, **kwargs):
        self._channel.send(name, [np.frombuffer(pickle.dumps((args, kwargs)), np.uint8)])

    def dispatch(self, output: SchedulerOutput) -> None:
        self._send("dispatch", output)

    def result(self) -> ModelRunnerOutput:
        self._send("result")
        return self._reply()

    def check_weights(self): pass

    @property
    def compile_progress(self):
        return 1, 1

    def close(self):
        for process, channel in self._started:
            channel.close()
        for process, _ in self._started:
            process.kill()
            process.wait()
