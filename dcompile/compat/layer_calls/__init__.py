"""Repeated layers, captured once: TorchDynamo traces two calls of equal layers; the others are copies of the second.

`frame` decides call by call, and `recorder` watches the second one. `call_key` and `guard_match` say whether another
call would be traced to the same. Then `frame` adds its operations, inputs and guards.
"""
