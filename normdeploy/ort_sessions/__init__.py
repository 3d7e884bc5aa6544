"""onnxruntime sessions, with a child process that tries risky ones first."""
