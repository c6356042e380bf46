"""Programs to copy from. Each runs on a CPU in less than a minute:

python -m kernels.examples.hugging_face
"""
