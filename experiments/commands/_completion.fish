
function __python_m_experiments
    test (pwd -P) = @CHECKOUT@; or return  # elsewhere, Python would run a module of that folder
    set -lx _ARGCOMPLETE 3
    set -lx _ARGCOMPLETE_DFS \t
    set -lx _ARGCOMPLETE_IFS \n
    set -lx _ARGCOMPLETE_SUPPRESS_SPACE 1
    set -lx _ARGCOMPLETE_SHELL fish
    set -lx COMP_LINE (commandline -p)
    set -lx COMP_POINT (string length (commandline -cp))
    set -lx COMP_TYPE
    eval (commandline -po)[1] -m experiments 8>&1 9>/dev/null 1>/dev/null 2>&1
end
for name in python python3
    complete -c $name -n 'string match -q "* -m experiments *" -- (commandline -cp)' \
        -f -a '(__python_m_experiments)'
end
