"""Small files of subtokens and of token pairs, as TensorFlow's official models write them."""

ESCAPES = "\\_u;0123456789"


def write_vocabulary(file, words, characters, reserved=("<pad>", "<EOS>")):
    """Writes reserved tokens, whole words, then characters and those of escapes."""
    lines = [*reserved, *(f"{word}_" for word in words), *sorted({*characters, *ESCAPES})]
    file.write_text("".join(f"'{line}'\n" for line in lines), encoding="utf-8")
    return file


def write_records(file, pairs):
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(file)) as writer:
        for pair in pairs:
            lists = {
                name: tf.train.Feature(int64_list=tf.train.Int64List(value=tokens))
                for name, tokens in pair.items()
            }
            example = tf.train.Example(features=tf.train.Features(feature=lists))
            writer.write(example.SerializeToString())
