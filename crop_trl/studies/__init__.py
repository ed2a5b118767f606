"""Studies: many training runs from one W&B sweep file, the row that each leaves, tables of them."""
