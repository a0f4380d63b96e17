"""Whether microbatches leave a loss as it is: `check_split`, and `check` of a step.

The step itself is the evidence. `step_check` runs it over its devices, beside all rows at once on
one device, on the given batch and on altered ones. If they agree, nothing else is compiled or run.
If not, `diagnose` runs each microbatch by itself, and tries the likeliest mistakes in their order.
`call` has the arguments as arrays, and alters them. `programs` has what is compiled, and what the
equations of the loss tell. All ends in a `report`.
"""
