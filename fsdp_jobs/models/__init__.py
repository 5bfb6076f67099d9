"""Models: plain nn.Modules from tokens [batch, seq] to logits [batch, seq, vocab]; FSDP is applied from outside."""
