"""What the input costs: throughput beside a hand-written tf.data pipeline and a PyTorch DataLoader,
and CPU time per host.

1. Throughput: training batches (random crop 224, flip, standardized float32) of the JPEG files of
   `clothing_small`, up to arrays on the device, on the same cores in one run; rounds are
   interleaved so that a disturbance of the machine hits all alike.
2. Scaling: CPU seconds that one of p = 1, 2, 4, 8 simulated processes spends on an epoch, with rows
   selected before decoding and, as Tarantella does, after it. Every measurement is a process of its
   own.
3. Shuffle: memory and time to the first batch of a shuffled random-access dataset of 10^9 examples.

    TNT_JAX_DATA=... python benchmarks/input_pipeline.py --output
    benchmarks/results/input_pipeline.json
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=7, help="measured epochs of each contender (default: 7)"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="global batch (default: 64)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="measured processes for each point of part 2 and 3 (default: 3)",
    )
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def unpack_images(folder):
    archive = Path(os.environ["TNT_JAX_DATA"]) / "clothing_small" / "clothing_train.tar"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return str(next(path for path in Path(folder).rglob("dress") if path.is_dir()).parent)


# ---- Contenders: each returns a function that yields the host batches of an epoch ----


def ours(folder, batch_size):
    from tnt_jax.data import ImageFormat, image_folder, training_images
    from tnt_jax.data.layout import RankSlice
    from tnt_jax.data.tf.tfdata import TfDataSource

    data = training_images(
        image_folder(folder), batch_size=batch_size, image_format=ImageFormat(scaling="mean_std")
    )
    source = TfDataSource(data, RankSlice(1))
    return lambda epoch: (batch.data for batch in source.batches(epoch))


def hand_written(folder, batch_size):
    import tensorflow as tf

    names = tf.constant(sorted(path.name for path in Path(folder).iterdir()))
    files = tf.data.Dataset.list_files(f"{folder}/*/*.jpg", shuffle=True, seed=42)

    def prepare(file):
        label = tf.argmax(tf.equal(names, tf.strings.split(file, os.sep)[-2]), output_type=tf.int32)
        jpeg = tf.io.read_file(file)
        start, extent, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(jpeg),
            tf.zeros([0, 0, 4]),
            0,
            0.1,
            (0.75, 4 / 3),
            (0.05, 1.0),
            100,
            True,
        )
        image = tf.io.decode_and_crop_jpeg(jpeg, tf.concat([start[:2], extent[:2]], 0), channels=3)
        image = tf.image.resize(tf.image.random_flip_left_right(image), [224, 224])
        return (image / 255.0 - MEAN) / DEVIATION, label

    dataset = (
        files.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )
    return lambda epoch: dataset.as_numpy_iterator()


class TorchImages:
    """A map-style dataset as torchvision's reference training makes it, with Pillow."""

    def __init__(self, folder):
        names = sorted(path.name for path in Path(folder).iterdir())
        self.files = [
            (str(file), label)
            for label, name in enumerate(names)
            for file in sorted((Path(folder) / name).iterdir())
        ]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        import numpy as np
        from PIL import Image

        file, label = self.files[index]
        image = Image.open(file).convert("RGB")
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=random_box(*image.size))
        if np.random.rand() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return (np.asarray(image, np.float32) / 255 - np.float32(MEAN)) / np.float32(
            DEVIATION
        ), label


def random_box(width, height):
    import numpy as np

    for _ in range(100):
        area, ratio = width * height * np.random.uniform(0.05, 1), np.random.uniform(0.75, 4 / 3)
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if w <= width and h <= height:
            left, top = np.random.randint(width - w + 1), np.random.randint(height - h + 1)
            return left, top, left + w, top + h
    return 0, 0, width, height


def torch_loader(folder, batch_size):
    import torch

    loader = torch.utils.data.DataLoader(
        TorchImages(folder), batch_size, shuffle=True, num_workers=os.cpu_count() or 1,
        persistent_workers=True, prefetch_factor=2,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    return lambda epoch: ((images.numpy(), labels.numpy()) for images, labels in loader)


# ---- Part 1 ----


def measure_throughput(folder, batch_size, rounds):
    import jax

    contenders = {
        "tnt_jax": ours,
        "tf.data, hand-written": hand_written,
        "PyTorch DataLoader, Pillow": torch_loader,
    }
    made = {name: make(folder, batch_size) for name, make in contenders.items()}
    rates = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, batches in made.items():
            begin, images = time.perf_counter(), 0
            for batch in batches(number):
                on_device = jax.device_put(batch)
                images += len(batch[1])
            jax.block_until_ready(on_device)
            if number:  # The first round warms up: threads, workers, file cache, automatic tuning.
                rates[name].append(images / (time.perf_counter() - begin))
    return {name: summary(values) for name, values in rates.items()}


def summary(values):
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": values,
    }


# ---- Part 2 and 3: run in processes of their own ----


def child_epoch(folder, split, num_processes, batch_size):
    """Prints the CPU seconds of an epoch of process 0 of `num_processes`, after one of warm-up."""
    from dataclasses import replace

    from tnt_jax.data import image_folder, training_images
    from tnt_jax.data.layout import RankSlice
    from tnt_jax.data.tf.tfdata import TfDataSource

    data = training_images(image_folder(folder).repeat(4), batch_size=int(batch_size))
    source = TfDataSource(replace(data, split=split), RankSlice(int(num_processes)))
    for _ in source.batches(0):
        pass
    begin = time.process_time()
    rows = sum(len(batch.data[1]) for batch in source.batches(1))
    print(json.dumps({"cpu_s": time.process_time() - begin, "rows": rows}))


class Numbers:
    """10^9 examples that cost nothing."""

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        return index


def peak_memory_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def child_shuffle():
    """Prints memory and time that the first batch of a shuffle over 10^9 examples takes."""
    from tnt_jax.data import RandomAccess
    from tnt_jax.data.layout import RankSlice
    from tnt_jax.data.random_access import RandomAccessSource

    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak to what is in use.
    before = peak_memory_mb()
    begin = time.perf_counter()
    source = RandomAccessSource(
        RandomAccess(Numbers(), batch_size=1024, shuffle=True), RankSlice(1)
    )
    batches = source.batches(epoch=0)
    next(batches)
    first_s = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(100):
        next(batches)
    batch_ms = (time.perf_counter() - begin) * 10
    print(
        json.dumps(
            {
                "first_batch_s": first_s,
                "extra_memory_mb": peak_memory_mb() - before,
                "batch_ms": batch_ms,
            }
        )
    )


def run_child(*arguments):
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )


def measure_scaling(folder, batch_size, repeats):
    results = {}
    for split in ("auto", "after"):
        for num_processes in (1, 2, 4, 8):
            runs = [
                run_child("epoch", folder, split, num_processes, batch_size) for _ in range(repeats)
            ]
            results[f"{split} {num_processes}"] = summary([run["cpu_s"] for run in runs]) | {
                "rows": runs[0]["rows"]
            }
    for key, result in results.items():
        result["ratio_to_p1"] = result["median"] / results[f"{key.split()[0]} 1"]["median"]
    return results


def versions():
    from importlib.metadata import version

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )
    packages = ("jax", "tensorflow-cpu", "torch", "pillow", "numpy")
    with open("/proc/cpuinfo") as file:
        processor = next(
            line.split(":")[1].strip() for line in file if line.startswith("model name")
        )
    return {
        "processor": processor, "cores": os.cpu_count(), "load_before": os.getloadavg(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(), "command": " ".join(["python", *sys.argv]),
        **{name: version(name) for name in packages},
    }  # fmt: skip


def main(arguments):
    result = {"environment": versions()}
    with tempfile.TemporaryDirectory() as folder:
        images = unpack_images(folder)
        result["images_per_s"] = measure_throughput(images, arguments.batch_size, arguments.rounds)
        for name, rate in result["images_per_s"].items():
            print(
                f"{name:28} {rate['median']:7.0f} images/s  ({rate['min']:.0f} to "
                f"{rate['max']:.0f})"
            )
        result["cpu_s_per_process"] = measure_scaling(
            images, arguments.batch_size, arguments.repeats
        )
        for name, cost in result["cpu_s_per_process"].items():
            print(
                f"split and processes {name:9} {cost['median']:6.2f} CPU s, "
                f"{cost['ratio_to_p1']:.3f} of p = 1"
            )
    runs = [run_child("shuffle") for _ in range(arguments.repeats)]
    result["shuffle_1e9"] = {key: summary([run[key] for run in runs]) for key in runs[0]}
    for key, value in result["shuffle_1e9"].items():
        print(
            f"shuffle of 10^9: {key} {value['median']:.3f} ({value['min']:.3f} to "
            f"{value['max']:.3f})"
        )
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()
    if ARGUMENTS.child:
        {"epoch": child_epoch, "shuffle": child_shuffle}[ARGUMENTS.child[0]](*ARGUMENTS.child[1:])
    else:
        main(ARGUMENTS)
