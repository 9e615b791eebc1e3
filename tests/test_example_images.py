"""What the image examples make of class folders and of sets that TensorFlow Datasets has
prepared.
"""

import example_modules  # noqa: F401
import numpy as np
import pytest
from example_images import write_images

import image_data  # isort: skip
import resnet50  # isort: skip


def test_folders_keep_photos_central_and_shift_them_otherwise_in_every_epoch(tmp_path):
    write_images(tmp_path, num_each=2)
    config = {
        "name": "folders",
        "data_dir": tmp_path,
        "image_size": 32,
        "scaling": "none",
        "crop": "central",
        "shift": 4,
    }
    data = image_data.make(config, batch_size=3, seed=0)
    first, again = (list(data.train.as_numpy_iterator()) for _ in range(2))
    assert [len(labels) for _, labels in first] == [3, 1]
    assert sorted(np.concatenate([labels for _, labels in first])) == [0, 0, 1, 1]
    num_shifted = 0
    for image, label in zip(*map(np.concatenate, zip(*first, *again, strict=True)), strict=True):
        colors = np.unique(image.reshape(-1, 3), axis=0)
        num_shifted += len(colors) == 2
        # Black where the shift has left nothing, and the plain colour of the class.
        assert len(colors) <= 2
        assert np.argmax(colors[-1]) == (2, 0)[label]
    assert num_shifted > 4
    assert not all(
        np.array_equal(one, two) for (one, _), (two, _) in zip(first, again, strict=True)
    )
    with pytest.raises(ValueError, match=r"There is no crop 'middle'"):
        image_data.make(config | {"crop": "middle"}, batch_size=3, seed=0)


def test_resnet_reads_images_prepared_by_tensorflow_datasets(tmp_path):
    import tensorflow_datasets as tfds

    class Colours(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            image = tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg")
            features = {"image": image, "label": tfds.features.ClassLabel(names=["blue", "red"])}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(5), "validation": self._generate_examples(3)}

        def _generate_examples(self, size):
            for number in range(size):
                yield (
                    number,
                    {
                        "image": np.full(
                            (40, 44, 3), ((0, 0, 255), (255, 0, 0))[number % 2], np.uint8
                        ),
                        "label": number % 2,
                    },
                )

    Colours(data_dir=tmp_path).download_and_prepare()
    args = resnet50.parse_args(
        [
            "--data_dir",
            str(tmp_path),
            "--tfds_name",
            "colours",
            "--image_size",
            "32",
            "--batch_size",
            "4",
        ]
    )
    train, valid, num_train = resnet50.make_data(args)
    assert num_train == 5
    for data, size in ((train, 5), (valid, 3)):
        batches = list(data.dataset.as_numpy_iterator())
        labels = np.concatenate([labels for _, labels in batches])
        assert sorted(labels) == sorted(number % 2 for number in range(size))
        for image, label in zip(
            np.concatenate([images for images, _ in batches]), labels, strict=True
        ):
            # Minus ImageNet's means the class's channel is the largest.
            assert image.shape == (32, 32, 3)
            assert np.argmax(image.mean((0, 1))) == (2, 0)[label]


@pytest.mark.parametrize("flag", ["--profile_runtimes", "--enable_time_history"])
def test_times_of_steps_have_the_name_of_the_tutorial_too(flag):
    args = resnet50.parse_args(["--synthetic_data", flag])
    (on_master,) = resnet50.make_callbacks(args)
    assert isinstance(on_master, resnet50.tnt.callbacks.OnMaster)
    assert not resnet50.make_callbacks(resnet50.parse_args(["--synthetic_data"]))
