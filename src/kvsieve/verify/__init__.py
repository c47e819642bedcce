"""The oracle: drives the real stack beside the float64 reference and says, in numbers, what differs.

For a user's own tests: ``from kvsieve.verify import assert_flow_correct``.
"""

from kvsieve.verify.checks import Fault, Numbers
from kvsieve.verify.report import FlowReport
from kvsieve.verify.run import assert_flow_correct, verify_flow

__all__ = ["Fault", "FlowReport", "Numbers", "assert_flow_correct", "verify_flow"]
