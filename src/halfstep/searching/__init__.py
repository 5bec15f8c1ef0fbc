"""Find the parts of a model that must stay in fp32."""
