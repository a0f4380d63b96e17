"""Whether microbatches leave a loss as it is: `check_split`, and `check` of a step.

`check_split` and `step_check` make `Programs` of a call and report what these tell. A `Call` is the
arguments as arrays; `probes` changes them in one respect each, and `noise` makes draws the same
everywhere. `programs` runs all rows at once, each microbatch, and the step, where `devices` says.
Each run is an `Outcome`. `evidence` has those of all batches, and joins microbatches in whatever
way it is told. `facts` are what the jaxpr of the loss tells. `diagnose` goes through hypotheses, of
which `weights` has the formulas, and says in `words` what to write. All ends in a `SplitReport`.
"""
