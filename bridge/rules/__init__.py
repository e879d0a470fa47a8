"""torch.optim's update equations as optax `GradientTransformation`s."""

from .elementwise import adadelta, adagrad, adam, adamax, asgd, nadam, radam, rmsprop, rprop, sgd

__all__ = ["adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"]
