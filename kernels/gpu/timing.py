"""How long a kernel takes on the card: captured in a CUDA graph, so that the host's time to start it does not count,
over a ring of inputs larger than the L2, so that what it reads comes from memory, as it does in a model.
"""

from collections.abc import Callable

import torch

Case = Callable[[int], object]  # number in the ring -> the launches to time

RING_BYTES = 200 * 2**20  # four times an H200's L2, three times an RTX 4090's
_REPEATS = 5


def ring_size(num_bytes: int) -> int:
    """Copies of so many bytes that no two uses of one find it in the L2."""
    return max(3, -(-RING_BYTES // num_bytes))


def graph_us(case: Case, ring: int) -> float:
    """Microseconds of one call: the fastest of some replays of `ring` calls, one after another."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which may still be making the inputs
    with torch.cuda.stream(stream):
        case(0)  # compiles what is not compiled yet
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(ring):
                case(i)
        graph.replay()
        return min(_replay_us(graph, stream) for _ in range(_REPEATS)) / ring


def _replay_us(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    graph.replay()
    end.record(stream)
    stream.synchronize()
    return start.elapsed_time(end) * 1e3


def read_gb_per_s() -> float:
    """What a plain sum over large tensors reads a second: the peak that shares of bandwidth are told of."""
    parts = [torch.ones(2**27, device="cuda") for _ in range(2)]
    return parts[0].numel() * 4 / graph_us(lambda i: parts[i].sum(), len(parts)) / 1e3
