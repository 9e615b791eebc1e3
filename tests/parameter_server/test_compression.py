import ml_dtypes
import numpy as np

from tnt_jax.parameter_server.server import from_wire, to_wire
from tnt_jax.parameter_server.worker import ErrorFeedback


def test_what_rounding_leaves_out_is_sent_later():
    rng = np.random.default_rng(0)
    feedback, sent = ErrorFeedback(), 0.0
    grads = [rng.normal(size=50).astype(np.float32) for _ in range(40)]
    for grad in grads:
        (rounded,) = feedback.rounded([grad])
        feedback.settle(was_applied=True)
        sent = sent + rounded.astype(np.float32)
    error = np.abs(sent - np.sum(grads, axis=0)).max()
    alone = sum(grad.astype(ml_dtypes.bfloat16).astype(np.float32) for grad in grads)
    assert error < 0.02 < np.abs(alone - np.sum(grads, axis=0)).max()


def test_a_gradient_that_was_dropped_leaves_no_trace():
    feedback = ErrorFeedback()
    grad = [np.full(3, 1.001, np.float32)]
    first = feedback.rounded(grad)
    feedback.settle(was_applied=False)
    second = feedback.rounded(grad)
    feedback.settle(was_applied=True)
    third = feedback.rounded(grad)
    np.testing.assert_array_equal(first[0], second[0])
    assert (third[0] != second[0]).any() or (1.002 - 2 * second[0].astype(np.float32) != 0).all()


def test_arrays_come_back_from_the_wire():
    arrays = [np.float32([1.5, -2]), np.array([1, 2], ml_dtypes.bfloat16), np.uint16([7])]
    sent = to_wire(arrays)
    assert sent[1].dtype == np.uint16
    for back, array in zip(from_wire(sent, [x.dtype for x in arrays]), arrays, strict=True):
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)
    (rounded,) = from_wire([arrays[1].view(np.uint16)], [np.dtype(np.float32)])
    np.testing.assert_array_equal(rounded, np.float32([1, 2]))
