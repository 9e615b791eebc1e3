"""Trains a Transformer (Vaswani et al. 2017, arXiv:1706.03762) and scores its translations.

    tnt-jax --hostfile hosts --devices-per-node 4 -- examples/transformer.py --data_dir=wmt14 \
        --vocab_file=wmt14/vocab.ende.32768 --bleu_source=wmt14/newstest2014.en \
        --bleu_ref=wmt14/newstest2014.de --param_set=big --train_epochs=30 --batch_size=32736

The test set is translated by beam search and scored by BLEU. `--data_dir` holds TFRecords of token
pairs as TensorFlow's official models prepare them (`*train*-of-*`), or one `*train*.tsv` with a
pair a line (`.gz` too), or `*train*.en` and `*train*.de` whose lines translate one another, or
wmt14_translate as prepared by TensorFlow Datasets. The vocabulary is a list of quoted subtokens or
a SentencePiece model; without `--vocab_file` one is learnt from the training texts and kept in
`--model_dir`.
`--batch_size` counts the tokens of a side in a step on all devices together.
"""

import argparse
import time
from pathlib import Path

import jax.numpy as jnp
import translation_data as data
from learning_rates import InverseSquareRoot
from translation_training import AverageWeights, LabelSmoothedCrossentropy, TokenAccuracy

import tnt_jax as tnt
from tnt_jax.models import PARAM_SETS, Transformer, Translator

# Tokens of a step and steps of warm-up that go with a parameter set, as in the tutorial.
TOKENS_PER_BATCH = {"tiny": 1024, "base": 2048, "big": 4096}
WARMUP_STEPS = {"tiny": 16_000, "base": 8000, "big": 8000}
SHAPE_FLAGS = (
    "width",
    "num_heads",
    "filter_dim",
    "num_layers",
    "dropout",
    "attention_dropout",
    "relu_dropout",
)


def make_settings(args, vocab_size):
    """Returns the attributes of the modules: those of the parameter set, changed by flags."""
    changes = {name: getattr(args, name) for name in SHAPE_FLAGS if getattr(args, name) is not None}
    dtype = jnp.bfloat16 if args.bfloat16 else jnp.float32
    return {**PARAM_SETS[args.param_set], **changes, "vocab_size": vocab_size, "dtype": dtype}


def make_model(args, settings):
    """Returns the compiled training view."""
    model = tnt.Model(Transformer(**settings), seed=args.seed)
    width, warmup = settings["width"], args.warmup_steps or WARMUP_STEPS[args.param_set]
    model.compile(
        optimizer=tnt.optimizers.Adam(
            InverseSquareRoot(args.learning_rate, width=width, warmup_steps=warmup),
            beta_1=0.9,
            beta_2=0.997,
            epsilon=1e-9,
        ),
        loss=LabelSmoothedCrossentropy(args.label_smoothing),
        metrics=[TokenAccuracy()] if args.enable_metrics_in_training else None,
        steps_per_execution=args.steps_per_execution,
    )
    return model


def make_translator(args, model, settings):
    """Returns the inference view of the model's weights."""
    search = {
        "num_beams": args.beam_size,
        "alpha": args.alpha,
        "extra_length": args.extra_decode_length,
    }
    return model.view(Translator(**settings, **search))


def train_data(args, pairs):
    """Returns the pairs in batches of about `--batch_size` tokens, split by `fit` or by hand."""
    if args.auto_data_dist:
        return tnt.data.TokenBatches(
            pairs, tokens_per_batch=args.batch_size, seed=args.shuffle_seed
        )
    return data.OwnShard(
        pairs,
        rows_per_batch=args.batch_size // args.max_length,
        length=args.max_length,
        process_index=tnt.get_process_index(),
        process_count=tnt.get_process_count(),
        seed=args.shuffle_seed,
    )


def make_callbacks(args):
    """Returns the callbacks that the flags ask for."""
    callbacks = []
    if args.model_dir and args.enable_checkpointing:
        path = Path(args.model_dir) / "checkpoint-{epoch:04d}"
        callbacks.append(tnt.callbacks.ModelCheckpoint(path, save_weights_only=True))
    if args.enable_tensorboard:
        callbacks.append(tnt.callbacks.TensorBoard(Path(args.model_dir) / "tensorboard"))
    if args.profile_runtimes:
        callbacks.append(
            tnt.callbacks.OnMaster(tnt.callbacks.RuntimeProfiler(logging_freq=10, print_freq=50))
        )
    return callbacks


def evaluate(args, translator, vocabulary, test):
    """Translates the test sources on all devices; the master prints BLEU and the first ones."""
    start = time.perf_counter()
    translations = data.translate(
        translator,
        vocabulary,
        test.sources,
        batch_size=args.decode_batch_size,
        max_length=args.decode_max_length,
    )
    if tnt.is_master_rank():
        seconds = time.perf_counter() - start
        print(
            f"Translated {len(translations)} sentences in {seconds:.1f} s on {tnt.get_size()} "
            f"device(s)."
        )
        for number in range(min(args.num_samples, len(translations))):
            print(f"  {test.sources[number]} -> {translations[number]} ({test.targets[number]})")
        for name, score, signature in data.bleu_scores(translations, test.targets):
            print(f"{name} = {score:.2f}  {signature}", flush=True)
        if args.translations:
            Path(args.translations).write_text(
                "".join(f"{line}\n" for line in translations), encoding="utf-8"
            )


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--data_dir", help="folder of the training texts")
    add(
        "--synthetic_data",
        action="store_true",
        help="random tokens, to measure everything but the input",
    )
    add("--source", default="en", help="language of the sources: ending of their files")
    add("--target", default="de", help="language of the targets: ending of their files")
    add(
        "--vocab_file",
        help="quoted subtokens or SentencePiece model; learnt and kept in --model_dir if left out",
    )
    add(
        "--vocab_size",
        type=int,
        default=32_768,
        help="tokens of a vocabulary that is learnt, or of --synthetic_data",
    )
    add("--bleu_source", help="file of test sentences, one a line")
    add("--bleu_ref", help="file of their translations")
    add("--max_words", type=int, help="leave out test sentences with more words")
    add("--param_set", choices=tuple(PARAM_SETS), default="big", help="sizes of the model")
    for name in SHAPE_FLAGS:
        add(
            f"--{name}",
            type=float if "dropout" in name else int,
            help=f"replaces {name} of the parameter set",
        )
    add("--train_epochs", type=int, default=1, help="epochs")
    add(
        "--epochs_between_evals",
        type=int,
        default=1,
        help="epochs from one translation of the test set to the next",
    )
    add("--batch_size", type=int, help="tokens of a side in a step; the parameter set's by default")
    add(
        "--max_length", type=int, default=256, help="longer pairs are left out, in tokens of a side"
    )
    add("--num_sentences", type=int, help="most training pairs")
    add(
        "--auto_data_dist",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let fit distribute the data, or do it by hand",
    )
    add(
        "--learning_rate",
        type=float,
        default=2.0,
        help="factor of the inverse-square-root schedule",
    )
    add("--warmup_steps", type=int, help="steps of warm-up; the parameter set's by default")
    add("--label_smoothing", type=float, default=0.1, help="probability taken from the true token")
    add(
        "--average_last",
        type=int,
        default=0,
        help="translate with the mean of the weights of the last so many epochs; 0: the last ones",
    )
    add("--beam_size", type=int, default=4, help="beams")
    add("--alpha", type=float, default=0.6, help="exponent of the length penalty")
    add(
        "--extra_decode_length",
        type=int,
        default=50,
        help="tokens by which a translation may be longer than its source",
    )
    add(
        "--decode_batch_size",
        type=int,
        default=32,
        help="sentences translated at a time by all devices together",
    )
    add("--decode_max_length", type=int, default=97, help="tokens of a test sentence that are read")
    add("--num_samples", type=int, default=5, help="translations to print")
    add("--translations", help="file for all translations")
    add("--bfloat16", action="store_true", help="compute in bfloat16")
    add("--steps_per_execution", type=int, default=1, help="steps of one compiled program")
    add(
        "--enable_metrics_in_training",
        action="store_true",
        help="also report the accuracy of tokens",
    )
    add(
        "--enable_checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="save weights in --model_dir every epoch",
    )
    add("--enable_tensorboard", action="store_true", help="write TensorBoard files in --model_dir")
    add(
        "--profile_runtimes",
        "--enable_time_history",
        action="store_true",
        help="print the times of steps",
    )
    add("--model_dir", help="folder for the learnt vocabulary, checkpoints and TensorBoard")
    add("--shuffle_seed", type=int, default=42, help="seed of the order of the pairs")
    add("--seed", type=int, default=0, help="seed of weights and dropout")
    add(
        "--verbose",
        type=int,
        choices=(0, 1, 2),
        default=2,
        help="0 silent, 1 bar, 2 one line an epoch",
    )
    args = parser.parse_args()
    args.batch_size = args.batch_size or TOKENS_PER_BATCH[args.param_set]
    problem = data.problem_of(args)
    if problem:
        parser.error(problem)
    return args


def main():
    args = parse_args()
    try:
        pairs, vocabulary = data.training_pairs(args)
        test = data.test_corpus(args)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"transformer.py: {error}") from error
    settings = make_settings(args, args.vocab_size if vocabulary is None else vocabulary.size)
    model = make_model(args, settings)
    translator = make_translator(args, model, settings)
    average = AverageWeights(args.average_last)
    batches, callbacks = train_data(args, pairs), [*make_callbacks(args), average]
    for epoch in range(0, args.train_epochs, args.epochs_between_evals):
        last = min(epoch + args.epochs_between_evals, args.train_epochs)
        model.fit(
            batches,
            initial_epoch=epoch,
            epochs=last,
            callbacks=callbacks,
            verbose=args.verbose,
            tnt_distribute_dataset=args.auto_data_dist,
        )
        if test is not None:
            with average.averaged(model):
                evaluate(args, translator, vocabulary, test)


if __name__ == "__main__":
    main()
