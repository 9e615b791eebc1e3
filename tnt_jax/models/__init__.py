"""Plain Flax Linen models: residual networks, a small CNN, a text classifier, and Transformers.

Nothing here knows how it is trained; each file can be used without the rest of the package.

    from tnt_jax import models

    module = models.resnet50(num_classes=1000, dtype=jnp.bfloat16)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "attention": ["Attention"],
        "decoder": ["DECODER_SIZES", "Decoder"],
        "decoding": ["Sequences", "beam_search", "greedy_search", "length_penalty"],
        "resnet": [
            "BasicBlock",
            "BottleneckBlock",
            "ResNet",
            "resnet18",
            "resnet34",
            "resnet50",
            "resnet50_v1",
            "resnet101",
            "resnet152",
            "CifarResNet",
            "resnet20",
            "resnet32",
            "resnet44",
            "resnet56",
            "resnet110",
            "ResNetSmall",
        ],
        "small": ["CNN", "TextClassifier"],
        "transformer": ["PARAM_SETS", "Transformer", "sinusoids"],
        "translation": ["Translator", "translate", "translate_greedily"],
    },
)
