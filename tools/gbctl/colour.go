package main

import (
	"io"
	"os"
	"slices"
	"strings"

	"charm.land/lipgloss/v2"
)

// wordStyles are for words that say how something is, in lower case. The dashboard has the same colours.
var wordStyles = map[string]lipgloss.Style{
	"error": bad, "failed": bad, "fail": bad, "doesn't serve": bad, "can't be had": bad,
	"warning": wait, "waiting": wait, "maintenance": wait, "locked": wait, "undone": wait,
	"ok": good, "done": good, "serves": good,
}

// stateColumns are the columns of tables that have such words.
var stateColumns = []string{"STATE", "HEALTH", "STAGE", "KUBERNETES"}

// painted is a word in its colour, if it has one and goes to a terminal with colours (https://no-color.org). Old
// consoles of Windows have no TERM.
func painted(w io.Writer, word string) string {
	style, known := wordStyles[strings.ToLower(strings.TrimSuffix(word, ":"))]
	if !known || !interactive(w) || os.Getenv("NO_COLOR") != "" || slices.Contains([]string{"", "dumb"}, os.Getenv("TERM")) {
		return word
	}
	return style.Render(word)
}

// paintedIn is a cell of a table.
func paintedIn(w io.Writer, column, cell string) string {
	if slices.Contains(stateColumns, column) {
		return painted(w, cell)
	}
	return cell
}
