# From lowdown's man page to one that is good to read at 80 columns.
:again
# Code in bold: terminals have no second font. (lowdown 1 and 2 write it differently.)
s/\\fC/\\fB/g
s/\\f(CR/\\fB/g
# No hyphens in the middle of a name, no stretched lines.
/^\.TH/a\
.ds AD l\
.ad l\
.nr HY 0\
.hy 0
# One form of heading, and no empty paragraph below it.
/^\.S[HS]$/{
N
s/\n/ /
b again
}
/^\.S[HS] /{
n
/^\.LP$/d
b again
}
# Blocks of code stand in a little.
/^\.EX$/i\
.RS 4
/^\.EE$/a\
.RE
# Tables: no boxes; each column as wide as it must be, and the last one takes the rest.
/^\.TS$/,/^\.TE$/{
s/^tab(|).*/tab(|);/
s/^\(lb .*\)lb$/\1lbx/
s/^\(l .*\)l\.$/\1lx./
/^T{$/{
:cell
N
N
s/T{\n\(.*\)\nT}|T{$/\1|T{/
t cell
s/\\fC/\\fB/g
s/\\f(CR/\\fB/g
}
}
# The text of a numbered item begins on the line of its number.
s/^\.IP "\([0-9]*\.\) *"$/.IP "\1" 4/
