from .base import Loss as Loss
from .base import LossFunctionWrapper as LossFunctionWrapper
from .base import check_labels as check_labels
from .base import check_outputs as check_outputs
from .base import divide_no_nan as divide_no_nan
from .crossentropy import BinaryCrossentropy as BinaryCrossentropy
from .crossentropy import BinaryFocalCrossentropy as BinaryFocalCrossentropy
from .crossentropy import CategoricalCrossentropy as CategoricalCrossentropy
from .crossentropy import CategoricalFocalCrossentropy as CategoricalFocalCrossentropy
from .crossentropy import (
    CategoricalGeneralizedCrossEntropy as CategoricalGeneralizedCrossEntropy,
)
from .crossentropy import KLDivergence as KLDivergence
from .crossentropy import SparseCategoricalCrossentropy as SparseCategoricalCrossentropy
from .crossentropy import binary_crossentropy as binary_crossentropy
from .crossentropy import binary_focal_crossentropy as binary_focal_crossentropy
from .crossentropy import categorical_crossentropy as categorical_crossentropy
from .crossentropy import categorical_focal_crossentropy as categorical_focal_crossentropy
from .crossentropy import (
    categorical_generalized_cross_entropy as categorical_generalized_cross_entropy,
)
from .crossentropy import kl_divergence as kl_divergence
from .crossentropy import sparse_categorical_crossentropy as sparse_categorical_crossentropy
from .lookup import deserialize as deserialize
from .lookup import get as get
from .lookup import serialize as serialize
from .regression import CategoricalHinge as CategoricalHinge
from .regression import CosineSimilarity as CosineSimilarity
from .regression import Hinge as Hinge
from .regression import Huber as Huber
from .regression import LogCosh as LogCosh
from .regression import MeanAbsoluteError as MeanAbsoluteError
from .regression import MeanAbsolutePercentageError as MeanAbsolutePercentageError
from .regression import MeanSquaredError as MeanSquaredError
from .regression import MeanSquaredLogarithmicError as MeanSquaredLogarithmicError
from .regression import Poisson as Poisson
from .regression import SquaredHinge as SquaredHinge
from .regression import categorical_hinge as categorical_hinge
from .regression import cosine_similarity as cosine_similarity
from .regression import hinge as hinge
from .regression import huber as huber
from .regression import log_cosh as log_cosh
from .regression import mean_absolute_error as mean_absolute_error
from .regression import mean_absolute_percentage_error as mean_absolute_percentage_error
from .regression import mean_squared_error as mean_squared_error
from .regression import mean_squared_logarithmic_error as mean_squared_logarithmic_error
from .regression import poisson as poisson
from .regression import squared_hinge as squared_hinge
from .whole_rows import CTC as CTC
from .whole_rows import Circle as Circle
from .whole_rows import Dice as Dice
from .whole_rows import Tversky as Tversky
from .whole_rows import circle as circle
from .whole_rows import ctc as ctc
from .whole_rows import dice as dice
from .whole_rows import tversky as tversky
