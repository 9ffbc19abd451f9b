"""The process group of torch whose operations are the collectives and messages of aiodaft.

torch calls it in any thread. An operation begins at once and writes into the tensors that it was given when its values
come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias

import torch
import torch.distributed
from torch.distributed import Work
from torch.futures import Future

from aiodaft._runtime.actors.host import block_on
from aiodaft._runtime.groups.exchanges import Among, Exchanges, Finish, Operation
from aiodaft.ref import Ref

# An exchange that has begun.
Begun: TypeAlias = Ref[Any] | Operation


class Handle(Work):
    """An operation.

    Args:
        refs: Its exchanges. Each writes into the tensors of the operation when it comes.
        executor: Runs code that is chained to its future, which may wait for further operations.
    """

    def __init__(self, exchanges: Exchanges, refs: Sequence[Begun], outputs: Any, executor: Executor) -> None:
        super().__init__()
        self._exchanges, self.refs, self._outputs, self._executor = exchanges, refs, outputs, executor

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of it, in any thread that runs no event loop.

        Raises:
            TimeoutError: The time is over; the operation goes on.
            Exception: The error of the operation, or the reason why the block is over.
        """
        try:
            for ref in self.refs:
                ref.result(timeout.total_seconds() or None)
        except BaseException as error:
            if (why := self._exchanges.reason(error)) is error:
                raise
            raise why from error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(ref.done() for ref in self.refs)

    def exception(self) -> BaseException | None:
        errors = [ref.exception() for ref in self.refs if ref.done()]
        return next((error for error in errors if error is not None), None)

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def result(self) -> Any:
        self.wait()
        return self._outputs

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if self.is_completed():
            self._settle(future)
        else:
            _when_done(list(self.refs), lambda: self._executor.submit(self._settle, future))
        return future

    def _settle(self, future: Future[Any]) -> None:
        try:
            future.set_result(self.result())
        except Exception as error:  # noqa: BLE001 - the one that waits gets it
            future.set_exception(error)


class Received(Handle):
    """A message that is received."""

    def source_rank(self) -> int:
        (ref,) = self.refs
        return int(ref.result())

    _source_rank = source_rank


def _when_done(refs: list[Begun], done: Callable[[], object]) -> None:
    if refs:
        refs.pop().add_done_callback(lambda _: _when_done(refs, done))
    else:
        done()


# Not all names have types.
dist: Any = torch.distributed

NAME: Final = "aiodaft"
# The threads that complete futures, at most: code that is chained to one may wait for others.
_THREADS: Final = 32
_OPS: Final[dict[Any, str | Callable[[Any, Any], Any]]] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "sum",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


class TorchGroup(dist.ProcessGroup):  # type: ignore[misc]  # without types
    """A process group, or a part of one by `new_group`; `name` is the one that torch gives it."""

    def __init__(self, among: Among, size: int, name: str, executor: Executor) -> None:
        super().__init__(among.rank, size)
        self._among, self._size, self._name, self._executor = among, size, name, executor
        self._coalesced: list[Begun] | None = None
        self._count = 0

    # The group.

    def rank(self) -> int:
        return self._among.rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802 - a name of torch
        return NAME

    _get_backend_name = getBackendName

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:  # noqa: N802 - a name of torch
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_sequence_number_for_group(self) -> int:
        return self._count

    def abort(self) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Operations under way end with the block."""

    # Collectives.

    def allreduce(self, tensors: Any, opts: Any = None) -> Handle:
        tensors = _listed(tensors)
        op, divide = _reduction(opts, self._size)
        if op == "sum" and len(tensors) == 1 and tensors[0].layout != torch.strided:
            op = torch.add
        refs = [self._begin("all_reduce", _value(x), partial(_set, x, divide), op, out=_room(x)) for x in tensors]
        return self._handle(refs, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Handle:
        if len({x.dtype for x in tensors}) > 1:
            return self.allreduce(tensors, opts)
        op, divide = _reduction(opts, self._size)
        ref = self._begin("all_reduce", _flat(tensors), partial(_set_parts, tensors, divide), op)
        return self._handle([ref], tensors)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Handle:
        tensors = _listed(tensors)
        root, (how, divide) = _root(opts), _reduction(opts if op is None else op, self._size)
        refs = [self._begin("reduce", _value(x), partial(_set, x, divide), how, root) for x in tensors]
        return self._handle(refs, tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Handle:
        tensors, root = _listed(tensors), _root(opts)
        mine = root == self.rank()
        refs = [
            self._begin("broadcast", _value(x) if mine else None, _nothing if mine else partial(_set, x, 0), root=root)
            for x in tensors
        ]
        return self._handle(refs, tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        outputs = outputs if isinstance(inputs, list | tuple) else [outputs]
        refs = [
            self._begin("all_gather", _value(x), partial(_set_each, parts))
            for parts, x in zip(outputs, _listed(inputs), strict=True)
        ]
        return self._handle(refs, outputs)

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: Any, opts: Any = None) -> Handle:
        # By ranks, and then by tensors.
        return self.allgather(list(map(list, zip(*outputs, strict=True))), inputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Handle:  # noqa: A002 - a name of torch
        return self.all_gather_single_coalesced([output], [input])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Handle:
        refs = [
            self._begin(
                "all_gather", _value(x), partial(_set_parts_each, output), out=_rooms(output, self._size, x.shape)
            )
            for output, x in zip(outputs, inputs, strict=True)
        ]
        return self._handle(refs, outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        root, x = _root(opts), _listed(inputs)[0]
        parts = (outputs[0] if isinstance(inputs, list) else outputs) if root == self.rank() else []
        ref = self._begin("gather", _value(x), partial(_set_each, parts), root=root)
        return self._handle([ref], outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        root, (output,) = _root(opts), _listed(outputs)
        items = (inputs[0] if isinstance(outputs, list) else inputs) if root == self.rank() else []
        ref = self._begin("scatter", [_value(x) for x in items] or None, partial(_set, output, 0), root=root)
        return self._handle([ref], outputs)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Handle:
        (output,), parts = _listed(outputs), inputs[0] if isinstance(outputs, list) else inputs
        op, divide = _reduction(opts, self._size)
        lengths = tuple(part.numel() for part in parts)
        ref = self._begin("reduce_scatter", _flat(parts), partial(_set, output, divide), op, lengths=lengths)
        return self._handle([ref], outputs)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Handle:  # noqa: A002 - a name of torch
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Handle:
        op, divide = _reduction(opts, self._size)
        refs = [
            self._begin(
                "reduce_scatter",
                _value(x).view(self._size, -1),
                partial(_set, output, divide),
                op,
                out=_room(output, 1),
            )
            for output, x in zip(outputs, inputs, strict=True)
        ]
        return self._handle(refs, outputs)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Handle:
        ref = self._begin("all_to_all", [_value(x) for x in inputs], partial(_set_each, outputs))
        return self._handle([ref], outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - a name of torch
        output_lengths: Sequence[int] = (),
        input_lengths: Sequence[int] = (),
        opts: Any = None,
    ) -> Handle:
        parts = [_rows(x, lengths, self._size) for x, lengths in ((output, output_lengths), (input, input_lengths))]
        return self._handle(self.alltoall(*parts).refs, output)

    def barrier(self, opts: Any = None) -> Handle:
        return self._handle([self._begin("barrier", None, _nothing)], [])

    # The names that torch had before 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Messages.

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Handle:
        return self._handle([self._among.send(_value(x), to, tag) for x in tensors], tensors)

    def recv(self, tensors: list[torch.Tensor], source: int | None, tag: int = 0) -> Received:
        refs = [self._among.recv(source, tag, partial(_set, x, 0)) for x in tensors]
        return Received(self._among.exchanges, refs, tensors, self._executor)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Received:
        return self.recv(tensors, None, tag)

    # Several operations with one handle.

    def _start_coalescing(self, device: object) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: object) -> Handle:
        refs, self._coalesced = self._coalesced or [], None
        return self._handle(refs, [])

    def _begin(self, operation: str, value: Any, finish: Finish, op: Any = "sum", root: int = 0, **more: Any) -> Begun:
        self._count += 1
        return self._among.begin(operation, value, finish, op, root, **more)

    def _handle(self, refs: Sequence[Begun], outputs: Any) -> Handle:
        if self._coalesced is not None:
            self._coalesced += refs
        return Handle(self._among.exchanges, refs, outputs, self._executor)


class Groups:
    """Makes the process groups of one block.

    Args:
        exchanges: Those of the block.
    """

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        self._executor = ThreadPoolExecutor(_THREADS, "aiodaft process group")

    def make(self, options: Any, _: object) -> TorchGroup:
        ranks = list(options.global_ranks_in_group) or range(options.group_size)
        among = self._exchanges.among(ranks, f"group {options.group_id}")
        block_on(self._exchanges.process, among.open_plan(self._executor), f"the group {options.group_id} of torch")
        return TorchGroup(among, options.group_size, options.group_id, self._executor)

    def close(self) -> None:
        self._executor.shutdown(wait=False)


class OwnStore(dist.Store):  # type: ignore[misc]  # without types
    """The store of one process: members find each other without one. A key of another process is an error."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, count: int) -> int:
        total = int(self._values.get(key, b"0")) + count
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        if not self.check(keys):
            raise RuntimeError(
                f"{keys[0]}: the process group of aiodaft has no store that processes share: for other backends and "
                "code that needs one, open process_group('gloo')"
            )


@contextmanager
def opened(exchanges: Exchanges, rank: int, size: int) -> Generator[Any]:
    # torch keeps no more of the store than what C++ needs.
    groups, store = Groups(exchanges), OwnStore()
    # The name is registered once in a process, for whatever block there is.
    _block.append(groups)
    if not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, lambda *asked: _block[-1].make(*asked), extended_api=True, devices=["cpu"])
    with ExitStack() as stack:
        stack.callback(_block.remove, groups)
        stack.callback(groups.close)
        dist.init_process_group(NAME, store=store, rank=rank, world_size=size)
        yield dist.group.WORLD


_block: Final[list[Groups]] = []


# Tensors that are given, and tensors that come.


def _listed(tensors: Any) -> list[torch.Tensor]:
    return tensors if isinstance(tensors, list | tuple) else [tensors]  # type: ignore[return-value]  # as torch calls it


def _value(x: torch.Tensor) -> torch.Tensor:
    if x.device.type != "cpu":
        raise ValueError(
            f"the process group of aiodaft is for tensors of the CPU, not of {x.device}: use process_group('nccl') for "
            "these, or x.cpu()"
        )
    return x.detach().contiguous() if x.layout == torch.strided else x.detach()


def _room(x: torch.Tensor, rows: int = 0) -> torch.Tensor | None:
    """A tensor of the program as memory for a result, which may be one of so many rows; None if it has gaps.

    One of the inference mode is written to in that mode only.
    """
    if x.layout != torch.strided or not x.is_contiguous() or x.is_inference() or x.is_conj() or x.is_neg():
        return None
    return x.data.view(rows, -1) if rows else x.data


def _rooms(x: torch.Tensor, count: int, shape: torch.Size) -> list[torch.Tensor] | None:
    room = _room(x)
    return None if room is None or room.numel() != count * shape.numel() else list(room.view(count, *shape).unbind())


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([_value(x).view(-1) for x in tensors])


def _rows(x: torch.Tensor, lengths: Sequence[int], parts: int) -> list[torch.Tensor]:
    if not lengths and x.shape[0] % parts:
        raise ValueError(f"all_to_all_single: {x.shape[0]} rows cannot be divided among {parts} ranks: give the sizes")
    return list(torch.split(x.detach(), list(lengths) or x.shape[0] // parts)) if x.shape[0] or lengths else [x] * parts


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))


def _reduction(opts: Any, size: int) -> tuple[Any, int]:
    """How values are combined, and the divisor of the result, or 0; by the options of torch, or its ReduceOp."""
    op = getattr(opts, "reduceOp", opts)
    op = dist.ReduceOp.SUM if op is None else getattr(op, "op", op)
    if op not in _OPS:
        raise ValueError(f"the process group of aiodaft has no {op}: there are {', '.join(map(str, _OPS))}")
    return _OPS[op], size if op == dist.ReduceOp.AVG else 0


def _nothing(_: object) -> None:
    pass


def _set(x: torch.Tensor, divide: int, value: torch.Tensor | None) -> None:
    if value is None:
        return
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        # `data` of a sparse tensor is one of its own.
        into = x.data if x.layout == torch.strided else x
        if divide:
            value = value / divide if value.is_floating_point() or value.is_complex() else value // divide
        elif value.layout == torch.strided and value.data_ptr() == into.data_ptr():
            # It is the result.
            return
        into.copy_(value if value.layout != torch.strided else value.view(into.shape))


def _set_parts(tensors: Sequence[torch.Tensor], divide: int, value: torch.Tensor) -> None:
    for x, part in zip(tensors, torch.split(value, [x.numel() for x in tensors]), strict=True):
        _set(x, divide, part)


def _set_each(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None) -> None:
    for x, value in zip(tensors, values or (), strict=True):
        _set(x, 0, value)


def _set_parts_each(output: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    if output.is_contiguous():
        _set_each(output.data.view(len(values), -1).unbind(), values)
    else:
        _set(output, 0, torch.cat([value.view(-1) for value in values]))
