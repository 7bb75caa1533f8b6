# SPDX-License-Identifier: Apache-2.0
"""Queue and batcher from Python: nests, memory, closing, errors."""

import ast
import gc
import os
import pathlib
import re
import subprocess
import sys
import time
import weakref

import libbeast
import numpy as np
import pytest
import torch

from tests.conftest import ROOT, run_python, wait_for
from tests.serving import Call

DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32"),
    *("uint64", "int64", "float16", "float32", "float64"),
]
X = np.arange(6.0).reshape(2, 3)


def through_queue(nest, batch_dim=0):
    """The batch that a queue makes of one item."""
    queue = libbeast.BatchingQueue(batch_dim=batch_dim)
    queue.enqueue(nest)
    return next(queue)


def through_batcher(inputs, outputs, batch_dim=0):
    """The batch's inputs, and what compute(inputs) gives if the answer is outputs."""
    batcher = libbeast.DynamicBatcher(batch_dim=batch_dim)
    call = Call(batcher.compute, inputs)
    batch = next(iter(batcher))
    batch.set_outputs(outputs)
    return batch.get_inputs(), call.result()


@pytest.fixture(params=[libbeast.BatchingQueue, libbeast.DynamicBatcher])
def closable(request):
    return request.param()


# Nests.


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_through_in_batches(dtype):
    first = np.array([[[0, 1, 100]], [[3, 4, 5]]]).astype(dtype)  # [2, 1, 3]
    second = torch.from_numpy(first + first)
    queue = libbeast.BatchingQueue(minimum_batch_size=2)
    queue.enqueue(first)
    queue.enqueue(second)
    batch = next(queue)
    assert isinstance(batch, torch.Tensor)
    assert batch.dtype == second.dtype
    np.testing.assert_array_equal(batch, np.concatenate([first, second], axis=1))


def test_bfloat16_comes_through():
    tensor = torch.tensor([1.0, -2.5, 3e38], dtype=torch.bfloat16)
    batch = through_queue(tensor)
    assert batch.dtype == torch.bfloat16
    assert torch.equal(batch, tensor)


def test_a_tensor_whose_memory_has_the_other_sign_comes_through():
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert tensor.is_neg()
    assert through_queue(tensor).tolist() == [-2.0, 4.0]
    assert through_batcher(tensor, tensor)[1].tolist() == [-2.0, 4.0]


def unaligned():
    """A view of a packed struct: its strides are no multiple of its items' size."""
    array = np.zeros(4, [("byte", "u1"), ("number", "<i4")])
    array["number"] = [1, -2, 3, 1 << 30]
    return array["number"]


LAYOUTS = {
    "transposed": X.T,
    "transposed tensor": torch.from_numpy(X).T,
    "sliced": X[:, ::2],
    "negative stride": X[::-1, ::-1],
    "negative inner stride": X[:, ::-1],
    "broadcast": np.broadcast_to(np.float32(7), (2, 3)),
    "expanded tensor": torch.arange(3).expand(2, 3),
    "no elements": np.zeros((2, 0, 3), np.int16),
    "no elements, tensor": torch.zeros((2, 0)),
    "read-only": np.frombuffer(b"\1\2\3", np.uint8),
    "unaligned": unaligned(),
    "eight dimensions": np.arange(8).reshape((2, 1, 2, 1, 2, 1, 1, 1)),
    "bytearray": bytearray(b"\1\2"),
    "memoryview": memoryview(X),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_comes_through_a_queue(name):
    batch = through_queue(LAYOUTS[name])
    np.testing.assert_array_equal(batch, np.asarray(LAYOUTS[name]))
    assert batch.is_contiguous()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_a_legal_answer(name):
    expected = np.asarray(LAYOUTS[name])
    _, outputs = through_batcher(np.zeros(len(expected)), LAYOUTS[name])
    np.testing.assert_array_equal(outputs, expected)


def test_keys_come_back_sorted_and_lists_as_tuples():
    nest = {"b": [X, (X + 1,)], "a": {"z": X + 2, "y": ()}, "c": []}
    batch = through_queue(nest)
    assert list(batch) == ["a", "b", "c"]
    assert list(batch["a"]) == ["y", "z"]
    assert batch["a"]["y"] == batch["c"] == ()
    assert isinstance(batch["b"], tuple)
    np.testing.assert_array_equal(batch["b"][1][0], X + 1)
    np.testing.assert_array_equal(batch["a"]["z"], X + 2)


def test_items_with_another_order_of_keys_are_alike():
    queue = libbeast.BatchingQueue(batch_dim=0, minimum_batch_size=4)
    queue.enqueue({"a": X, "b": X + 1})
    queue.enqueue({"b": X + 1, "a": X})
    batch = next(queue)
    np.testing.assert_array_equal(batch["a"], np.concatenate([X, X]))


def endless():
    nest = []
    nest.append(nest)
    return nest


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("text", TypeError, "str"),
        (b"bytes", TypeError, "bytes"),
        (None, TypeError, "NoneType"),
        ({1, 2}, TypeError, "set"),
        ({1: X}, TypeError, "string keys"),
        (np.array([None]), TypeError, "object"),
        (np.array(["text"]), TypeError, "U4"),
        (np.zeros(2, ">f4"), TypeError, ">f4"),
        (np.zeros(2, ">i8"), TypeError, ">i8"),
        (np.zeros(2, complex), TypeError, "complex128"),
        (np.zeros(2, "M8[s]"), TypeError, "datetime64"),
        (np.zeros(2, [("x", "f4")]), TypeError, "x"),
        (torch.zeros(2, dtype=torch.complex64), TypeError, "complex64"),
        (torch.zeros(2).to(torch.float8_e4m3fn), TypeError, "float8_e4m3fn"),
        (2**70, TypeError, "object"),
        (torch.zeros(2, requires_grad=True), (TypeError, ValueError), "detach"),
        (torch.zeros(2, 2).to_sparse(), (TypeError, ValueError), "strided|sparse"),
        (torch.zeros(2, device="meta"), (TypeError, ValueError), "meta"),
        (1.5, ValueError, r"at least 1 dim.*shape \(\)"),
        (7, ValueError, r"at least 1 dim.*shape \(\)"),
        (True, ValueError, r"at least 1 dim.*shape \(\)"),
        (np.float32(1), ValueError, r"at least 1 dim.*shape \(\)"),
        (torch.tensor(1), ValueError, r"at least 1 dim.*shape \(\)"),
        (np.zeros((0, 3)), ValueError, "at least one row|2 rows"),
        (np.zeros((3, 3)), ValueError, r"2 rows.*shape \(3, 3\)"),
        (np.zeros((1,) * 9), ValueError, "8 dimensions.*9"),
        (endless(), ValueError, "nested more than 16 deep"),
    ],
)
def test_what_is_no_array_is_refused_with_its_field(value, error, text):
    nest = {"a": np.zeros(2), "part": (np.zeros(2), value)}
    for take in (
        libbeast.BatchingQueue(batch_dim=0).enqueue,
        libbeast.DynamicBatcher(batch_dim=0).compute,
    ):
        with pytest.raises(error, match=rf"(?s)part\[1\].*({text})"):
            take(nest)


def test_a_nest_without_arrays_is_refused():
    with pytest.raises(ValueError, match="at least one array"):
        libbeast.BatchingQueue().enqueue({"a": ()})


# Memory.


def address(array):
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data


def test_items_are_taken_without_a_copy():
    array = np.zeros((1, 1), np.float32)
    queue = libbeast.BatchingQueue()
    queue.enqueue(array)
    array[0, 0] = 7  # Nobody should; it shows that the queue holds this very array.
    assert next(queue)[0, 0] == 7


def test_inputs_and_outputs_are_given_without_a_copy():
    batcher = libbeast.DynamicBatcher(batch_dim=0, minimum_batch_size=3)
    calls = [Call(batcher.compute, np.full((1, 2), 1.0))]
    wait_for(lambda: batcher.size() == 1, "first call")
    calls += [Call(batcher.compute, np.full((2, 2), 2.0))]
    batch = next(iter(batcher))
    assert len(batch) == 3
    assert batch.get_inputs()[:, 0].tolist() == [1, 2, 2]
    assert batch.get_inputs().data_ptr() == batch.get_inputs().data_ptr()
    outputs = {"array": np.arange(6).reshape(3, 2), "tensor": torch.arange(3)}
    batch.set_outputs(outputs)
    first, second = (call.result() for call in calls)
    for key, output in outputs.items():
        assert address(first[key]) == address(output[:1])
        assert address(second[key]) == address(output[1:])
        np.testing.assert_array_equal(second[key], output[1:])


def test_arrays_outlive_queue_batcher_and_batch():
    queue = libbeast.BatchingQueue(batch_dim=0)
    queue.enqueue(X)
    from_queue = next(queue)
    batcher = libbeast.DynamicBatcher(batch_dim=0)
    call = Call(batcher.compute, X + 1)
    batch = next(iter(batcher))
    inputs = batch.get_inputs()
    outputs = X + 2
    kept = weakref.ref(outputs)
    batch.set_outputs(outputs)
    answer = call.result()
    del queue, batcher, batch, outputs, call
    gc.collect()
    for _ in range(100):
        through_queue(np.full((2, 3), -1.0))
    np.testing.assert_array_equal(from_queue, X)
    np.testing.assert_array_equal(inputs, X + 1)
    np.testing.assert_array_equal(answer, X + 2)
    assert kept() is not None
    del answer
    gc.collect()
    assert kept() is None


def rss():
    """Bytes of memory that this process has."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_thousands_of_batches_leave_no_memory_behind():
    array, tensor = np.zeros((1, 1 << 14)), torch.zeros((1, 1 << 14))  # 128 and 64 kB
    queue = libbeast.BatchingQueue(batch_dim=0, minimum_batch_size=2)
    batcher = libbeast.DynamicBatcher(batch_dim=0)
    batches = iter(batcher)

    def one_round():
        queue.enqueue({"array": array, "tensor": tensor})
        queue.enqueue({"array": array, "tensor": tensor})
        next(queue)
        call = Call(batcher.compute, (array, tensor))
        batch = next(batches)
        batch.set_outputs(batch.get_inputs())
        call.result()

    for _ in range(100):
        one_round()
    references, before = sys.getrefcount(array), rss()
    for _ in range(1000):
        one_round()
    assert sys.getrefcount(array) == references
    assert rss() - before < 16 << 20  # One copy in each round would be 500 MB.


def test_items_that_were_never_handed_out_are_let_go_with_the_queue():
    array = np.zeros((1, 1))
    references = sys.getrefcount(array)
    queue = libbeast.BatchingQueue()
    queue.enqueue(array)
    queue.close()
    del queue
    assert sys.getrefcount(array) == references


def test_numpy_comes_out_where_torch_is_not_loaded():
    script = """
        import sys, threading
        import numpy as np
        import libbeast

        queue = libbeast.BatchingQueue(batch_dim=0)
        for dtype in ("bool", "uint8", "int64", "float16", "float64"):
            array = np.arange(6).reshape(2, 3).astype(dtype)
            queue = libbeast.BatchingQueue(batch_dim=0)
            queue.enqueue({"x": array[:, ::-1]})
            batch = next(queue)["x"]
            assert type(batch) is np.ndarray and batch.dtype == dtype
            assert batch.flags.writeable
            np.testing.assert_array_equal(batch, array[:, ::-1])

        batcher = libbeast.DynamicBatcher(batch_dim=0)
        answers = []
        thread = threading.Thread(
            target=lambda: answers.append(batcher.compute(np.zeros(2)))
        )
        thread.start()
        batch = next(iter(batcher))
        assert np.shares_memory(batch.get_inputs(), batch.get_inputs())
        outputs = np.arange(6).reshape(2, 3)[:, ::-1]
        batch.set_outputs(outputs)
        thread.join(timeout=10)
        assert np.shares_memory(answers[0], outputs)
        np.testing.assert_array_equal(answers[0], outputs)
        del queue, batcher, batch
        np.testing.assert_array_equal(answers[0], outputs)
        assert "torch" not in sys.modules
    """
    run_python(script)


def test_the_core_brings_no_protobuf_library():
    """It once crashed beside another one, of grpcio-tools, in the process."""
    assert "libprotobuf" not in pathlib.Path("/proc/self/maps").read_text()


# Batches.


def test_batches_have_the_sizes_that_were_asked_for():
    queue = libbeast.BatchingQueue(
        batch_dim=0, minimum_batch_size=3, maximum_batch_size=3
    )
    for i in range(3):
        queue.enqueue(np.full((4,), i))
    assert queue.size() == 12
    batches = [next(queue).tolist() for _ in range(4)]
    assert batches == [[0, 0, 0], [0, 1, 1], [1, 1, 2], [2, 2, 2]]
    assert queue.size() == 0


def test_past_the_timeout_a_batch_is_what_there_is():
    queue = libbeast.BatchingQueue(batch_dim=0, minimum_batch_size=9, timeout_ms=30)
    queue.enqueue(np.zeros(2))
    began = time.monotonic()
    assert len(next(queue)) == 2
    batcher = libbeast.DynamicBatcher(batch_dim=0, minimum_batch_size=9, timeout_ms=30)
    call = Call(batcher.compute, np.zeros(2))
    batch = next(iter(batcher))
    assert len(batch) == 2
    assert 0.05 < time.monotonic() - began < 1
    batch.set_outputs(np.zeros(2))
    call.result()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_dim": -1}, "batch_dim.*-1"),
        ({"batch_dim": 8}, "batch_dim.*8"),
        ({"minimum_batch_size": 0}, "minimum_batch_size.*0"),
        ({"minimum_batch_size": 3, "maximum_batch_size": 2}, "maximum_batch_size.*2"),
        ({"timeout_ms": -1}, "timeout_ms"),
        ({"timeout_ms": float("nan")}, "timeout_ms"),
    ],
)
def test_impossible_options_are_refused(options, text):
    for kind in (libbeast.BatchingQueue, libbeast.DynamicBatcher):
        with pytest.raises(ValueError, match=text):
            kind(**options)


def test_a_queue_that_could_never_fill_a_batch_is_refused():
    with pytest.raises(ValueError, match=r"maximum_queue_size.*minimum_batch_size=4"):
        libbeast.BatchingQueue(minimum_batch_size=4, maximum_queue_size=3)


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"a": X.astype("f4")}, r"a: expected float64 of shape \(2, 3\).*got float32"),
        ({"a": X[:, :2]}, r"a: expected .*\(2, 3\).*got .*\(2, 2\)"),
        ({"a": X[0]}, r"a: expected .*\(2, 3\).*got .*\(3,\)"),
        ({"b": X}, r"expected \{a: \*\}, got \{b: \*\}"),
        (X, r"expected \{a: \*\}, got \*"),
    ],
)
def test_an_item_unlike_the_first_is_refused(item, text):
    queue = libbeast.BatchingQueue(batch_dim=0)
    queue.enqueue({"a": X})
    with pytest.raises(ValueError, match=text):
        queue.enqueue(item)
    unchecked = libbeast.BatchingQueue(
        batch_dim=0, minimum_batch_size=3, check_inputs=False
    )
    unchecked.enqueue({"a": X})
    unchecked.enqueue(item)
    with pytest.raises(ValueError, match=text):
        next(unchecked)


def test_enqueue_waits_while_the_queue_is_full():
    queue = libbeast.BatchingQueue(batch_dim=0, maximum_queue_size=2)
    queue.enqueue(np.zeros(2))
    call = Call(queue.enqueue, np.ones(1))
    call.join(timeout=0.2)
    assert call.is_alive()
    assert queue.size() == 2
    assert next(queue).tolist() == [0, 0]
    call.result()
    assert next(queue).tolist() == [1]


# Closing.


def test_iteration_ends_when_it_closes(closable):
    call = Call(list, closable)
    call.join(timeout=0.15)
    assert call.is_alive()
    closable.close()
    assert call.result(1) == []
    assert list(closable) == []


def test_a_second_close_raises(closable):
    assert not closable.is_closed()
    closable.close()
    assert closable.is_closed()
    with pytest.raises(RuntimeError, match="closed already"):
        closable.close()


def test_a_closed_queue_hands_out_what_it_accepted():
    queue = libbeast.BatchingQueue(0, minimum_batch_size=2, maximum_batch_size=2)
    queue.enqueue(np.arange(5))
    queue.close()
    assert [batch.tolist() for batch in queue] == [[0, 1], [2, 3], [4]]


def test_close_discards_only_when_told():
    queue = libbeast.BatchingQueue(0, minimum_batch_size=2, maximum_batch_size=2)
    array = np.arange(5)
    references = sys.getrefcount(array)
    queue.enqueue(array)
    queue.close(discard=True)
    assert queue.size() == 0
    assert sys.getrefcount(array) == references
    assert list(queue) == []


def test_close_after_the_producers_ended_drops_no_item():
    """1,000 rounds: BEAST_ROUNDS=100."""
    item = np.zeros(1)
    for _ in range(10 * int(os.environ.get("BEAST_ROUNDS", "3"))):
        queue = libbeast.BatchingQueue(batch_dim=0, maximum_batch_size=1)
        consumers = [Call(sum, map(len, queue)) for _ in range(64)]
        producers = [
            Call(lambda queue: [queue.enqueue(item) for _ in range(100)], queue)
            for _ in range(16)
        ]
        for producer in producers:
            producer.result()
        queue.close()
        assert sum(consumer.result() for consumer in consumers) == 1600


def test_close_ends_every_wait():
    queue = libbeast.BatchingQueue(batch_dim=0, maximum_queue_size=1)
    queue.enqueue(np.zeros(1))
    batcher = libbeast.DynamicBatcher(batch_dim=0)
    calls = [Call(queue.enqueue, np.zeros(1)) for _ in range(3)]
    calls += [Call(batcher.compute, np.zeros(1))]
    # The first waits for its answer, the second for a batch.
    batch = next(iter(batcher))
    calls += [Call(batcher.compute, np.zeros(1))]
    wait_for(lambda: batcher.size() == 1, "second call")
    queue.close()
    batcher.close()
    for call in calls:
        with pytest.raises(libbeast.ClosedBatchingQueue, match="is closed"):
            call.result(1)
    batch.set_outputs(np.zeros(1))  # Too late, and no error of this thread.


def test_nothing_enters_what_is_closed(closable):
    closable.close()
    method = getattr(closable, "enqueue", None) or closable.compute
    with pytest.raises(libbeast.ClosedBatchingQueue, match="is closed"):
        method(np.zeros((1, 1)))
    assert issubclass(libbeast.ClosedBatchingQueue, RuntimeError)


# Answers.


def test_outputs_are_set_once():
    batcher = libbeast.DynamicBatcher(batch_dim=0)
    call = Call(batcher.compute, X)
    batch = next(iter(batcher))
    batch.set_outputs(X)
    with pytest.raises(ValueError, match="twice"):
        batch.set_outputs(X)
    np.testing.assert_array_equal(call.result(), X)


def test_outputs_that_do_not_fit_are_refused_and_may_be_mended():
    batcher = libbeast.DynamicBatcher(batch_dim=1)
    batches = iter(batcher)
    good = {"action": np.zeros((1, 2)), "logits": np.zeros((1, 2, 5))}
    call = Call(batcher.compute, np.zeros((3, 2)))
    next(batches).set_outputs(good)
    call.result()
    call = Call(batcher.compute, np.zeros((3, 2)))
    batch = next(batches)
    for wrong, text in (
        ({"logits": np.zeros((1, 3, 5))}, r"logits: .*2 rows.*\(1, 3, 5\)"),
        ({"action": np.zeros(2)}, r"action: expected at least 2 dim.*\(2,\)"),
        ({"logits": np.zeros((1, 2))}, r"logits: expected .*\(1, 2, 5\).*\(1, 2\)"),
        ({"logits": np.zeros((1, 2, 4))}, r"logits: expected .*\(1, 2, 5\).*, 4\)"),
        ({"action": np.zeros((1, 2), int)}, r"action: expected float64.*got int64"),
        ({"more": np.zeros((1, 2))}, r"expected \{action: \*, logits: \*\}, got"),
        ({"action": "left"}, r"action: expected an array.*str"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            batch.set_outputs(good | wrong)
    with pytest.raises(ValueError, match=r"action: expected 2 rows.*got .*\(1, 3\)"):
        batch.set_outputs({"action": np.zeros((1, 3)), "logits": np.zeros((1, 3, 5))})
    assert call.is_alive()
    batch.set_outputs(good)
    assert call.result()["logits"].shape == (1, 2, 5)


def test_an_exception_in_the_loop_fails_the_waiters_at_once():
    batcher = libbeast.DynamicBatcher(batch_dim=0)

    def infer():
        for batch in batcher:
            inputs = batch.get_inputs()
            raise ZeroDivisionError(f"{len(inputs)} rows are too many")

    call = Call(batcher.compute, X)
    with pytest.raises(ZeroDivisionError) as kept:
        infer()
    # The traceback, and with it the batch, is alive.
    assert kept.tb is not None
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError\('2 rows are too many"):
        call.result(1)


def test_an_exception_that_cannot_be_shown_fails_the_waiters_too():
    class UnspeakableError(Exception):
        def __repr__(self):
            raise ZeroDivisionError("no words")

    def in_loop(batcher):
        for batch in batcher:
            raise UnspeakableError(batch)

    def in_block(batcher):
        with next(iter(batcher)) as batch:
            raise UnspeakableError(batch)

    for infer in (in_loop, in_block):
        batcher = libbeast.DynamicBatcher(batch_dim=0)
        call = Call(batcher.compute, X)
        with pytest.raises(UnspeakableError):
            infer(batcher)
        with pytest.raises(RuntimeError, match="UnspeakableError"):
            call.result(1)


def test_a_batch_that_is_dropped_fails_its_waiters_at_once():
    batcher = libbeast.DynamicBatcher(batch_dim=0)
    call = Call(batcher.compute, X)
    batch = next(iter(batcher))
    del batch
    with pytest.raises(RuntimeError, match="dropped without outputs"):
        call.result(1)


def test_a_with_block_fails_the_waiters_when_it_is_left():
    batcher = libbeast.DynamicBatcher(batch_dim=0)
    batches = iter(batcher)
    call = Call(batcher.compute, X)
    with next(batches) as batch:
        batch.set_outputs(X)
    np.testing.assert_array_equal(call.result(), X)
    call = Call(batcher.compute, X)
    with next(batches) as batch:
        pass
    with pytest.raises(RuntimeError, match="left without outputs"):
        call.result(1)
    call = Call(batcher.compute, X)
    with pytest.raises(ZeroDivisionError), next(batches) as batch:
        raise ZeroDivisionError("no model")
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError\('no model'\)"):
        call.result(1)


def test_a_batch_may_be_failed_with_a_reason():
    batcher = libbeast.DynamicBatcher(batch_dim=0)
    call = Call(batcher.compute, X)
    batch = next(iter(batcher))
    batch.fail("the GPU is gone")
    batch.fail("again")
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        call.result(1)


def test_a_batch_iterator_cannot_be_made_by_hand():
    with pytest.raises(TypeError):
        next(type(iter(libbeast.DynamicBatcher()))())


def test_many_threads_get_their_own_answers():
    batcher = libbeast.DynamicBatcher(batch_dim=0, maximum_batch_size=5)

    def infer():
        for batch in batcher:
            batch.set_outputs(batch.get_inputs() * 2)

    def ask(number):
        for i in range(50):
            rows = np.full(1 + i % 3, number * 1000 + i)
            np.testing.assert_array_equal(batcher.compute(rows), rows * 2)

    inference = [Call(infer) for _ in range(2)]
    for call in [Call(ask, number) for number in range(6)]:
        call.result(30)
    batcher.close()
    for call in inference:
        call.result()


# What is said of it.


def test_the_stub_names_what_the_module_has():
    stub = ast.parse((ROOT / "csrc" / "libbeast.pyi").read_text())

    def arguments(function):
        given = function.args
        names = [given.posonlyargs, given.args, given.kwonlyargs]
        return [[argument.arg for argument in part] for part in names]

    def of_module(method):
        """pybind11 writes the signature into the docstring's first line."""
        signature = method.__doc__.partition("\n")[0]
        return arguments(ast.parse(f"def {signature}: ...").body[0])

    for item in stub.body:
        if isinstance(item, ast.FunctionDef):
            assert arguments(item) == of_module(getattr(libbeast, item.name))
        if not isinstance(item, ast.ClassDef) or item.name.startswith("_"):
            continue
        described = getattr(libbeast, item.name)
        methods = {m.name: m for m in item.body if isinstance(m, ast.FunctionDef)}
        runtime = {name for name in vars(described) if not name.startswith("_")}
        assert {name for name in methods if not name.startswith("_")} == runtime
        for name, method in methods.items():
            if not method.decorator_list and not re.match("__(?!init)", name):
                assert arguments(method) == of_module(getattr(described, name)), name
    classes = {item.name for item in stub.body if hasattr(item, "name")}
    public = {name for name in vars(libbeast) if not name.startswith("_")}
    assert {name for name in classes if not name.startswith("_")} == public


def test_the_program_in_the_docs_runs():
    page = (ROOT / "docs" / "core.md").read_text()
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(21, 8, 4)") == 3
