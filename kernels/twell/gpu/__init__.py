"""What the GPU backends share: the adapter to `interface.Backend`, the saved CSR matrix, and the dense backup."""
