"""The records that the stages of the pipeline hand each other: frozen dataclasses, sizes in bytes, times in seconds.

Each file has the records of one command or topic; all of their public names are here.  ``wire`` turns any record into
plain JSON or YAML values and back.
"""

from memopt_cli.records.baseline import *
from memopt_cli.records.batch import *
from memopt_cli.records.batch_shaping import *
from memopt_cli.records.device import *
from memopt_cli.records.dropped import *
from memopt_cli.records.equivalence import *
from memopt_cli.records.explanation import *
from memopt_cli.records.fastest_training import *
from memopt_cli.records.header import *
from memopt_cli.records.inputs import *
from memopt_cli.records.inspection import *
from memopt_cli.records.layout import *
from memopt_cli.records.learning import *
from memopt_cli.records.measurement import *
from memopt_cli.records.model import *
from memopt_cli.records.optimization import *
from memopt_cli.records.plan import *
from memopt_cli.records.profile import *
from memopt_cli.records.rank import *
from memopt_cli.records.request import *
from memopt_cli.records.search_options import *
from memopt_cli.records.selftest import *
from memopt_cli.records.settings import *
from memopt_cli.records.summary import *
from memopt_cli.records.trace import *
from memopt_cli.records.verification import *
from memopt_cli.records.wire import *
