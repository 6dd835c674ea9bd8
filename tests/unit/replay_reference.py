"""TaskGraph → start and end of each task, in plain Python: the definition that the replay kernel is tested against.

Slow on purpose: it scans every queue at every moment. `at` is the clock, `queue` what has been told to start on each
device, with the moment from which it is ready.
"""

import math

from offbeat.simulate.taskgraph import TaskGraph


def replay_slowly(graph: TaskGraph) -> tuple[list[float], list[float]]:
    """Start and end of each task in seconds."""
    run = _Run(graph)
    for task, waits_for in enumerate(graph.indegree.tolist()):
        if waits_for == 0:
            run.become_ready(task)
    while any(run.queue.values()):
        run.at = min(run.next_choice(device) for device in run.queue)
        # Tasks that take no time end at this very moment, and may make others ready that a device should prefer.
        while instants := [task for task in run.choices() if run.takes_no_time(task)]:
            run.execute(instants)
        run.execute(run.choices())
    return run.start, run.end


class _Run:
    def __init__(self, graph: TaskGraph) -> None:
        self.device = graph.device.tolist()
        self.duration = graph.duration_seconds.tolist()
        self.lag = graph.lag_seconds.tolist()
        self.priority = [0.0] * len(graph) if graph.priority is None else graph.priority.tolist()
        first, successor = graph.first_edge.tolist(), graph.successor.tolist()
        self.successors = [successor[first[i] : first[i + 1]] for i in range(len(graph))]
        self.waits_for = graph.indegree.tolist()
        self.structure = graph.tie_keys["structure"].tolist()
        self.separated = graph.separated_keys["finest"].tolist()
        self.tail = [0.0] * len(graph)
        for i in reversed(graph.topological.tolist()):
            behind = max((self.tail[s] for s in self.successors[i]), default=0.0)
            self.tail[i] = self.duration[i] + (self.lag[i] + behind)
        self.at = 0.0
        self.ready = [0.0] * len(graph)
        self.start, self.end = [0.0] * len(graph), [0.0] * len(graph)
        self.free = {device: 0.0 for device in self.device if device >= 0}
        self.queue: dict[int, list[int]] = {device: [] for device in self.free}

    def become_ready(self, task: int) -> None:
        if self.device[task] < 0:
            self.begin(task, self.ready[task])
            self.tell_successors(task)
        else:
            self.queue[self.device[task]].append(task)

    def next_choice(self, device: int) -> float:
        """When the device is free and something is ready for it."""
        return max(self.free[device], min((self.ready[task] for task in self.queue[device]), default=math.inf))

    def choices(self) -> list[int]:
        """What each device that is free now would start now."""
        free = [device for device in self.queue if self.free[device] <= self.at]
        ready = [[task for task in self.queue[device] if self.ready[task] <= self.at] for device in free]
        return [min(tasks, key=self.order) for tasks in ready if tasks]

    def order(self, task: int) -> tuple[float | int, ...]:
        return (
            self.priority[task],
            self.ready[task],
            -self.tail[task],
            self.structure[task],
            self.separated[task],
            task,
        )

    def takes_no_time(self, task: int) -> bool:
        return self.at + self.duration[task] == self.at

    def execute(self, tasks: list[int]) -> None:
        """Runs tasks of different devices that were chosen together."""
        for task in tasks:
            device = self.device[task]
            self.queue[device].remove(task)
            self.begin(task, self.at)
            self.free[device] = self.end[task]
        for task in tasks:
            self.tell_successors(task)

    def begin(self, task: int, moment: float) -> None:
        self.start[task], self.end[task] = moment, moment + self.duration[task]

    def tell_successors(self, task: int) -> None:
        for successor in self.successors[task]:
            self.ready[successor] = max(self.ready[successor], self.end[task] + self.lag[task])
            self.waits_for[successor] -= 1
            if self.waits_for[successor] == 0:
                self.become_ready(successor)
