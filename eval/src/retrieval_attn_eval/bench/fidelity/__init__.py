"""`retrieval-attn bench fidelity`: how far a method's next-token distributions are from full attention's."""
