
_python_m_experiments() {
    [[ "${COMP_WORDS[*]:1:2}" == "-m experiments" ]] || return
    [[ . -ef @CHECKOUT@ ]] || return  # elsewhere, Python would run a module of that folder
    local IFS=$'\013'
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_TYPE="$COMP_TYPE" \
        _ARGCOMPLETE=3 _ARGCOMPLETE_SHELL=bash _ARGCOMPLETE_SUPPRESS_SPACE=1 \
        _ARGCOMPLETE_COMP_WORDBREAKS="$COMP_WORDBREAKS" \
        "${1/#\~/$HOME}" -m experiments 8>&1 9>/dev/null 1>/dev/null 2>&1 </dev/null))
    [[ "${COMPREPLY-}" != *[=.] ]] || compopt -o nospace
}
complete -o bashdefault -o default -F _python_m_experiments python python3
