"""Define the models that tests export and optimize.

They are the norms of the project's table (its rows), other spellings of these norms, lookalikes, and small nets.

The package imports only torch. Each module has one family of models, and ``models.registry`` lists all of them.
"""
