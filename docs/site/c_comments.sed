# c_api.h has plain C comments. Doxygen reads them as documentation after this: a comment at a line's begin belongs to
# what follows, one behind code to what stands before it. Lines of dashes are headings.
s|^/\* --- .*||
1!s|^( *)/\* |\1/** |
s|([;,{0-9A-Z]) +/\* |\1 /**< |
