"""Small image files for the tests of the examples."""

import numpy as np


def write_images(folder, num_each=6):
    """Writes class folders of plain red and blue JPEG files."""
    import tensorflow as tf

    for part in ("train", "validation"):
        for name, color in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            (folder / part / name).mkdir(parents=True)
            for number in range(num_each):
                image = np.full((40, 44, 3), color, np.uint8)
                (folder / part / name / f"{number}.jpg").write_bytes(
                    tf.io.encode_jpeg(image).numpy()
                )
