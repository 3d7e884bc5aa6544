"""What ``export`` and ``optimize`` share: what is asked of a file that is written, and the stages that lead to it."""
