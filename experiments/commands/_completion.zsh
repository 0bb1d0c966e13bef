
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_python_m_experiments() {
    if [[ "$words[2] $words[3]" != "-m experiments" ]]; then
        (( $+functions[_python] )) && _python "$@" || _files
        return
    fi
    [[ . -ef @CHECKOUT@ ]] || return  # elsewhere, Python would run a module of that folder
    local IFS=$'\013' ends=()
    local completions=($(COMP_LINE="$BUFFER" COMP_POINT="$CURSOR" \
        _ARGCOMPLETE=3 _ARGCOMPLETE_SHELL=zsh _ARGCOMPLETE_SUPPRESS_SPACE=1 \
        ${~words[1]} -m experiments 8>&1 9>/dev/null 1>/dev/null 2>&1 </dev/null))
    [[ "${completions[1]}" != *[=.]:* ]] || ends=(-S '')
    _describe experiments completions "${ends[@]}"
}
compdef _python_m_experiments python python3
