"""The pickle machine: Python's own pure-Python one, cut down to the opcodes that tensors and bucket metadata have.

The C one crashes on a deeply nested key and takes gigabytes for a large memo index. Every object is charged against the
memory that the payload may take when its opcode is read. Which globals a pickle may name is the subclass's:
`PickleMachine.find_class`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any, ClassVar, cast

from sgld_lora_merge.errors import RequestError, name_some
from sgld_lora_merge.wire.described import DescribedEntry, DescribedTensor, FileDescriptor, refuse_file_descriptor
from sgld_lora_merge.wire.layout import BucketEntry
from sgld_lora_merge.wire.limits import MOST_OPCODES, MemoryBudget

ENTRY_FIELDS = {field.name for field in fields(BucketEntry)}

# Opcode -> bytes of memory that it takes at most with CPython 3.11: its object, the object's place on the stack, and
# what containers take to grow. Texts and bytes take their own length besides, and that was sent.
_OPCODES = {
    "PROTO": 0, "STOP": 0, "MARK": 80, "NONE": 9, "NEWTRUE": 9, "NEWFALSE": 9, "BININT": 48, "BININT1": 9,
    "BININT2": 48, "LONG1": 64, "BINFLOAT": 40, "BINBYTES": 64, "SHORT_BINBYTES": 64, "BINBYTES8": 64,
    "EMPTY_DICT": 89, "EMPTY_LIST": 81, "EMPTY_TUPLE": 9, "TUPLE": 64, "TUPLE1": 73, "TUPLE2": 73, "TUPLE3": 81,
    "APPEND": 40, "APPENDS": 40, "GLOBAL": 105, "STACK_GLOBAL": 105, "BINGET": 9, "LONG_BINGET": 9, "BINPUT": 124,
    "LONG_BINPUT": 124, "MEMOIZE": 124,
}  # fmt: skip
_TEXT_OPCODES = {"BINUNICODE": 80, "SHORT_BINUNICODE": 80, "BINUNICODE8": 80}
_CALL_NBYTES = 200  # REDUCE, NEWOBJ: the description of a tensor or a storage, or an entry
FIELD_NBYTES = 100  # an item of a dict
DICT_NBYTES = 240  # of a dict that has an item
_PART_NBYTES = 24  # a part of a sequence that a call copies


def _code(name: str) -> int:
    return cast(int, getattr(pickle, name)[0])


def _strict_text(opcode: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return the opcode, but for lone surrogates, with which no answer could name the text."""

    def read(unpickler: PickleMachine) -> None:
        opcode(unpickler)
        unpickler.stack[-1].encode()

    return read


class PickleMachine(pickle._Unpickler):
    """Reads one pickle.

    Args:
        file: of the pickle, at its beginning.
        memory: that its objects may take.
    """

    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: io.BytesIO, memory: MemoryBudget) -> None:
        super().__init__(file)
        self._file = file
        self._memory = memory

    def load(self) -> Any:
        """Run the opcodes, each of which is charged before it is run.

        Frames are not kept apart: their bytes follow each other in the payload, which is in memory.
        """
        self.read, self.readline = self._file.read, self._file.readline
        self.metastack: list[Any] = []
        self.stack = []
        self.append = self.stack.append
        self.proto = 0
        dispatch, costs, memory, read = self.dispatch, _COSTS, self._memory, self._file.read
        try:
            for _ in range(MOST_OPCODES):
                if not (key := read(1)):
                    raise EOFError("it ends without STOP")
                opcode = key[0]
                memory.left -= costs[opcode]
                if memory.left < 0:
                    raise memory.exceeded()
                dispatch[opcode](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]  # as Python's own loop ends
            return stop.value
        raise RequestError(f"the payload has more than {MOST_OPCODES} opcodes")

    def _skip_frame(self) -> None:
        """Skip FRAME: its length is not needed."""
        self.read(8)

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a global.

        Raises:
            RequestError: the pickle may not name it.
        """
        raise NotImplementedError

    def _call(self) -> None:
        """Run REDUCE; what the call may copy is charged."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            raise RequestError("the payload calls something without a tuple of arguments")
        for part in arguments:
            if type(part) in (str, bytes):
                self._memory.spend(len(part))
            elif type(part) in (tuple, list):
                self._memory.spend(_PART_NBYTES * len(part))
        made = function(*arguments)
        if type(made) is dict:
            self._memory.spend(DICT_NBYTES + FIELD_NBYTES * len(made))
        elif type(made) is DescribedTensor:
            self._memory.spend(2 * _PART_NBYTES * len(made.size))
        self.append(made)

    def _make(self) -> None:
        """Run NEWOBJ, for the only two classes that pickles of ours and of sglang's instantiate."""
        arguments, cls = self.stack.pop(), self.stack.pop()
        if cls is FileDescriptor:
            refuse_file_descriptor()
        if cls is not DescribedEntry or arguments != ():
            raise RequestError("the payload makes an object of another class than FlattenedTensorMetadata")
        self.append(DescribedEntry())

    def _give_fields(self) -> None:
        """Run BUILD: set the fields of one metadata entry, and no state of anything else."""
        state, entry = self.stack.pop(), self.stack[-1]
        if type(entry) is not DescribedEntry or type(state) is not dict:
            raise RequestError(f"the payload sets attributes of a {type(entry).__name__}")
        if unknown := sorted(state.keys() - ENTRY_FIELDS):
            raise RequestError(f"bucket metadata has fields that are unknown: {name_some(unknown)}")
        self._memory.spend(DICT_NBYTES)
        vars(entry).update(state)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or not all(type(key) is str for key in items[::2]):
            raise RequestError("a dict in the payload has keys that are not names")
        self._memory.spend((0 if target else DICT_NBYTES) + FIELD_NBYTES * (len(items) // 2))
        target.update(zip(items[::2], items[1::2], strict=True))

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_marked_items(self) -> None:
        self._set_items(self.pop_mark())

    dispatch: ClassVar[dict[int, Callable[..., Any]]] = {
        **{code: pickle._Unpickler.dispatch[code] for code in map(_code, _OPCODES)},
        **{code: _strict_text(pickle._Unpickler.dispatch[code]) for code in map(_code, _TEXT_OPCODES)},
        pickle.FRAME[0]: _skip_frame,
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _make,
        pickle.BUILD[0]: _give_fields,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_marked_items,
    }


_COSTS = [0] * 256
for _name, _cost in (_OPCODES | _TEXT_OPCODES).items():
    _COSTS[_code(_name)] = _cost
for _code_called in (pickle.REDUCE[0], pickle.NEWOBJ[0], pickle.BINPERSID[0]):
    _COSTS[_code_called] = _CALL_NBYTES
