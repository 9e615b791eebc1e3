"""Reads, checks and changes the YAML configurations of `train.py`; it says which key it does not
know and which one is near.
"""

import copy
import difflib
import os

import yaml

# Every key that may stand in a section; those of data and model depend on the name and are checked
# where they are used.
SECTIONS = {
    "description": None,
    "output_dir": None,
    "seed": None,
    "data": None,
    "model": None,
    "optimizer": {
        "name",
        "lr",
        "lr_scaling",
        "beta_1",
        "beta_2",
        "epsilon",
        "momentum",
        "nesterov",
        "rho",
        "weight_decay",
        "clipnorm",
    },
    "training": {
        "batch_size",
        "n_epochs",
        "lr_warmup_epochs",
        "loss",
        "metrics",
        "lr_schedule",
        "label_smoothing",
    },
    "device": {"intra_threads"},
}
REQUIRED = {
    "data": ("name",),
    "model": ("name",),
    "optimizer": ("name", "lr"),
    "training": ("batch_size", "n_epochs", "loss"),
}
NUMBERS = {
    "optimizer": SECTIONS["optimizer"] - {"name", "lr_scaling", "nesterov"},
    "training": {"batch_size", "n_epochs", "lr_warmup_epochs", "label_smoothing"},
}
LR_SCALINGS = ("linear", "sqrt", "none")


def load(path, changes=()):
    """Returns the checked configuration of a file.

    Args:
        path: YAML file.
        changes: Texts `section.key=value`, read as YAML, that replace what the file says.

    Raises:
        ValueError: If a key is unknown, missing or of the wrong kind.
    """
    with open(path, encoding="utf-8") as file:
        config = yaml.safe_load(file) or {}
    for change in changes:
        _set(config, change)
    check(config)
    if config.get("output_dir"):
        config["output_dir"] = _expanded(config["output_dir"])
    return config


def check(config):
    """Raises a ValueError if a key is unknown, missing or of the wrong kind."""
    check_keys(config, SECTIONS, "the configuration")
    for section, keys in REQUIRED.items():
        if not isinstance(config.get(section), dict):
            raise ValueError(
                f"The configuration needs a section {section!r} with {', '.join(keys)}."
            )
        missing = [key for key in keys if key not in config[section]]
        if missing:
            raise ValueError(f"The section {section!r} needs {', '.join(missing)}.")
    for section, keys in SECTIONS.items():
        if keys is not None and section in config:
            check_keys(config[section], keys, f"the section {section!r}")
    for section, keys in NUMBERS.items():
        for key in keys & set(config[section]):
            _check_number(config[section][key], f"{section}.{key}")
    scaling = config["optimizer"].get("lr_scaling", "linear")
    if scaling not in LR_SCALINGS:
        raise ValueError(
            f"optimizer.lr_scaling must be one of {', '.join(LR_SCALINGS)}, but is {scaling!r}."
        )
    for part in config["training"].get("lr_schedule", ()):
        check_keys(
            part, {"start_epoch", "end_epoch", "multiplier"}, "an entry of training.lr_schedule"
        )


def check_keys(given, known, where):
    """Raises a ValueError that names the nearest known key if `given` has an unknown one."""
    for key in given:
        if key not in known:
            raise ValueError(
                f"{where[0].upper()}{where[1:]} has no key {key!r}.{nearest(key, known)} Known: "
                f"{', '.join(sorted(known))}."
            )


def choose(name, table, kind):
    """Returns `table[name]`; a ValueError lists the known names."""
    if name not in table:
        raise ValueError(
            f"There is no {kind} {name!r}.{nearest(name, table)} Known: {', '.join(sorted(table))}."
        )
    return table[name]


def nearest(name, known):
    """Returns a question that names the nearest known name, or nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


def show(config):
    """Returns the configuration as YAML."""
    return yaml.safe_dump(config, sort_keys=False)


def _set(config, change):
    path, equals, text = change.partition("=")
    if not equals:
        raise ValueError(f"A change must read section.key=value, but is {change!r}.")
    *sections, key = path.split(".")
    place = config
    for section in sections:
        place = place.setdefault(section, {})
    place[key] = copy.deepcopy(yaml.safe_load(text))


def _check_number(value, where):
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        # YAML 1.1 reads 1e-4 as text.
        raise ValueError(
            f"{where} must be a number, but is {value!r}. Write a decimal point before an "
            f"exponent, as in 1.0e-4."
        )


def _expanded(path):
    expanded = os.path.expanduser(os.path.expandvars(path))
    if "$" in expanded:
        raise ValueError(
            f"output_dir is {path}, but {expanded} still has a variable that the environment "
            f"does not set."
        )
    return expanded
