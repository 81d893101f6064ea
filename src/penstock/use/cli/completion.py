"""`penstock completion`: a script with which a shell completes verbs, options, choices, files and
folders.

The script asks `penstock` itself for candidates (see `candidates`), so it stays right when penstock
is updated. A press of the key costs the start of Python and less than a tenth of a second more.
"""

from typing import Annotated

import typer

from penstock.core.errors import ConfigError

BASH = r"""# bash completion of penstock; in ~/.bashrc: eval "$(penstock completion bash)"
_penstock_completion() {
    local IFS=$'\n' word=${COMP_WORDS[COMP_CWORD]} kind line
    local -a answer=()
    while read -r line; do answer+=("$line"); done < <(
        _PENSTOCK_COMPLETE=1 "$1" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null
    )
    kind=${answer[0]} COMPREPLY=()
    [[ $word == '=' ]] && word=
    for line in "${answer[@]:1}"; do COMPREPLY+=("${line%%$'\t'*}"); done
    case $kind in
        # Without candidates, readline completes files by itself, with ~ and quotes.
        files) if ((${#COMPREPLY[@]})); then COMPREPLY+=($(compgen -f -- "$word")); compopt -o filenames; fi ;;
        folders) compopt -o dirnames +o default ;;
        *) compopt +o default; [[ ${COMPREPLY[0]} == *: ]] && compopt -o nospace ;;
    esac 2>/dev/null
    return 0
}
complete -o default -F _penstock_completion penstock
"""  # noqa: E501

ZSH = r"""#compdef penstock
# zsh completion of penstock; in ~/.zshrc, after compinit: eval "$(penstock completion zsh)"
_penstock() {
    local kind line
    local -a answer described
    answer=("${(@f)$(_PENSTOCK_COMPLETE=1 ${words[1]} "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    kind=${answer[1]}
    for line in "${(@)answer[2,-1]}"; do
        line="${${line//:/\\:}/$'\t'/:}"
        described+=("${line%:}")
    done
    (( ${#described} )) && _describe -t penstock penstock described
    case $kind in
        files) compset -P '--[^=]#='; _files ;;
        folders) compset -P '--[^=]#='; _files -/ ;;
    esac
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _penstock "$@"; else compdef _penstock penstock; fi
"""  # noqa: E501

FISH = r"""# fish completion of penstock; in ~/.config/fish/config.fish: penstock completion fish | source
function __penstock_candidates
    set -l words (commandline -opc) (commandline -ct)
    set -l answer (env _PENSTOCK_COMPLETE=1 $words[1] $words[2..-1] 2>/dev/null)
    test (count $answer) -gt 1; and printf '%s\n' $answer[2..-1]
    switch $answer[1]
        case files
            __fish_complete_path (commandline -ct)
        case folders
            __fish_complete_directories (commandline -ct) ''
    end
end
complete -c penstock -f -a '(__penstock_candidates)'
"""  # noqa: E501

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


def run(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> None:
    """Print the script with which a shell completes penstock's verbs, options, choices, files and
    folders.

    Put the line that the script begins with into your shell's start file, or write the script to
    where the shell looks for such scripts (bash:
    ~/.local/share/bash-completion/completions/penstock).

    Example:
        eval "$(penstock completion bash)"
        penstock completion fish > ~/.config/fish/completions/penstock.fish
    """
    if shell not in SCRIPTS:
        raise ConfigError(
            f"completion: no script for {shell!r}; expected one of {', '.join(SCRIPTS)}"
        )
    print(SCRIPTS[shell], end="")
