from __future__ import annotations

from typing import Literal

GROUP = "here"
# Bash and zsh ask the command line itself, through argcomplete: $_ARGCOMPLETE=3, the words begin behind `-m`.
# What else follows `python` is left to what completed it before, or to files.
BASH = r"""
_python_m_experiments() {
    [[ "${COMP_WORDS[*]:1:2}" == "-m experiments" ]] || return
    local IFS=$'\013'
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_TYPE="$COMP_TYPE" \
        _ARGCOMPLETE=3 _ARGCOMPLETE_SHELL=bash _ARGCOMPLETE_SUPPRESS_SPACE=1 \
        _ARGCOMPLETE_COMP_WORDBREAKS="$COMP_WORDBREAKS" \
        "${1/#\~/$HOME}" -m experiments 8>&1 9>/dev/null 1>/dev/null 2>&1 </dev/null))
    [[ "${COMPREPLY-}" != *[=.] ]] || compopt -o nospace
}
complete -o bashdefault -o default -F _python_m_experiments python python3
"""
ZSH = r"""
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_python_m_experiments() {
    if [[ "$words[2] $words[3]" != "-m experiments" ]]; then
        (( $+functions[_python] )) && _python "$@" || _files
        return
    fi
    local IFS=$'\013' ends=()
    local completions=($(COMP_LINE="$BUFFER" COMP_POINT="$CURSOR" \
        _ARGCOMPLETE=3 _ARGCOMPLETE_SHELL=zsh _ARGCOMPLETE_SUPPRESS_SPACE=1 \
        ${~words[1]} -m experiments 8>&1 9>/dev/null 1>/dev/null 2>&1 </dev/null))
    [[ "${completions[1]}" != *[=.]:* ]] || ends=(-S '')
    _describe experiments completions "${ends[@]}"
}
compdef _python_m_experiments python python3
"""
FISH = r"""
function __python_m_experiments
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
"""


def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """What a shell needs to complete words at Tab: eval "$(python -m experiments completion bash)"

    Commands, options, figures, settings and their values, methods, runs. Into ~/.bashrc, ~/.zshrc or
    ~/.config/fish/config.fish it may go as well; in other folders than this checkout it completes nothing.

    Args:
        shell: which one.
    """
    print({"bash": BASH, "zsh": ZSH, "fish": FISH}[shell], end="")
    return 0
