"""Compare quantized files of normdeploy and of other tools; see ``__main__``."""
