"""Objectives: what a run minimises. One folder for each paper, or family of objectives.

    registry.py            the names that a recipe can use, and the checks across objectives
    options.py             base class of the options: pydantic, no torch
    objective.py           base class of the work: hidden states in, loss and metrics out
    weighted_sum.py        the weighted sum of a run's objectives
    aligned/               aligned training: ce, aligned, separate_classifiers,
                           cosine_alignment, kl_to_last
    simreg/                SimReg and its four baselines
    dispersion/            the dispersion loss and its three alternatives
    nitp/, headless/       next implicit token prediction; contrastive weight tying

A family has two modules, because recipes are checked before torch is loaded. `options.py` holds
what a recipe can say and the facts that others need (does it train the head, is it for
classifiers, which layers does it read). `objective.py` holds the `torch.nn.Module`.

The losses themselves stay in `exitserve_training.losses`: functions of tensors that know neither
recipe nor model, of use without this trainer. Several serve more than one objective.

To add an objective:

1. Make a folder with `options.py`: a subclass of `ObjectiveOptions` with a `name`, its options
   with the paper's defaults, and the facts that differ from the base class's.
2. Write its `objective.py`: a subclass of `Objective`, whose constructor takes the options and a
   `BuildContext`. Name it in the options as `implementation`, `"module:Class"`.
3. Add the options to `OBJECTIVES` in `registry.py`.

Nothing else lists objectives. `tests/train/objectives/test_registry.py` adds one this way.
"""
