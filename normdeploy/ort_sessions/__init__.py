"""onnxruntime sessions. A model that may crash onnxruntime is first run in a child process."""
