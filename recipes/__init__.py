"""The recipes that ship with meshpar: `meshpar recipes` lists them."""
