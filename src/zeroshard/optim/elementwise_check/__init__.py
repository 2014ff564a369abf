"""Find out by experiment on what an optimizer can run: flat slices, or whole parameters.

[Note: testing that an optimizer is elementwise]
zeroshard steps an optimizer on flat slices that split matrices and join parameters ([Note: optimizer slices]). This is
correct only if the update of each element depends on that element alone. If it depends on its parameter alone, an owner
steps the whole parameter ([Note: whole parameters]). The class name does not tell: a subclass of AdamW may clip per
tensor, a rule may read ``p.ndim``, a group may keep a sum over all parameters. So unless the class is one of torch's
own, copies of the optimizer step the same values with the same gradients:

    on full tensors     | (6, 4) | (5,) | () | (2, 3, 2, 2) | (4, 6) | (1,) | …
    as slices of ranks  | rank 0: one slice   | rank 1: one slice             …     and other splits
    whole, of two ranks | (6, 4) |      | () |              | (4, 6) |      | …     and other selections

After each step the values must match, at the end also the states, and the numbers stored in groups and in the optimizer
itself. A group whose slices match is elementwise; else it needs whole parameters if these match; else the optimizer is
rejected, since it reads several parameters at once, or their order. At last all groups are stepped together, each as it
was found, since one group may read another. ``Trial`` says what is stepped, ``TrialRun`` steps one copy, and
``compare_runs`` compares two runs; ``find_whole_param_groups`` decides which trials run, and ``RuleChecker`` when they
run again after ``shard()``.

What the trials must detect, and how:

- trust ratios, clipping by norm: gradients from 1e-8 to 1e6, tensors of different scales, zeros, in fp64, where
  elementwise results match to 1e-12 of the change of an element;
- rules on dimensions or sizes: 0 to 4 dimensions and those of the model, a second trial with large tensors in the
  model's own dtype, and a matrix as large as the largest of the model, up to 1040 x 1040;
- rules that join tensors of one shape, or of one number of dimensions: two of each, which two ranks have;
- warmups and work on every n-th step: after some steps the step counters are set close to 10,000, then to 1,000,000;
- sums over all parameters (Prodigy, D-Adaptation): gradients that keep their direction; all numbers are compared;
- a rank that has no elements of a group: an empty group;
- attributes and names of parameters: whole parameters have them, slices do not;
- parameters without a gradient: some of the tensors have none in one step.

An optimizer that cannot be tested is rejected: if it raises on the copies, needs a closure, draws random numbers,
communicates, holds parameters outside its groups, has hooks or a replaced ``step``, keeps states that are not those of
a parameter, or stores what cannot be copied. The user's optimizer is only read, and no global random state changes. The
copies run on the CPU (on the GPU only if that does not decide), without torch.compile.
"""

from zeroshard.optim.elementwise_check.classification import find_whole_param_groups
from zeroshard.optim.elementwise_check.rule_checker import RuleChecker

__all__ = ["RuleChecker", "find_whole_param_groups"]
