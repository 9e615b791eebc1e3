"""Reads what TensorBoard would show."""

import struct

import numpy as np


def events(folder):
    """Returns (tag, step, value) of the scalars and (tag, step) of the histograms in the event
    files of a folder.
    """
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for file in sorted(folder.glob("events*")):
        raw, at = file.read_bytes(), 0
        while at < len(raw):
            (length,) = struct.unpack_from("<Q", raw, at)
            event = Event.FromString(raw[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.append((value.tag, event.step, value.simple_value))
                elif value.WhichOneof("value") == "tensor":
                    content, listed = value.tensor.tensor_content, value.tensor.float_val
                    numbers = np.frombuffer(content, np.float32) if content else listed
                    found.append(
                        (value.tag, event.step, *([float(numbers[0])] if len(numbers) == 1 else []))
                    )
                else:
                    found.append((value.tag, event.step))
    return found
