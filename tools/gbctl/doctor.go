package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) doctorCommand() *cobra.Command {
	return a.outputFlag(command("doctor", func(cmd *cobra.Command, _ []string) error {
		answers, failed := gather(cmd.Context(), a, diagnose)
		err := showBlocks(a, answers, failed, a.findings)
		isError := func(f *apiv1.Finding) bool { return f.Severity == apiv1.Finding_SEVERITY_ERROR }
		if err == nil && slices.ContainsFunc(answers, func(n answer[*apiv1.DiagnoseResponse]) bool { return slices.ContainsFunc(n.value.Findings, isError) }) {
			return &exitError{codeUnhealthy, nil}
		}
		return err
	}))
}

var diagnose = asking(ofNode, nodeAPI.Diagnose, &apiv1.DiagnoseRequest{})

func (a *app) findings(node string, m *apiv1.DiagnoseResponse) error {
	if len(m.Findings) == 0 {
		_, err := fmt.Fprintf(a.out, "%s: nothing is wrong (%s)\n", node, plural(len(m.Checked), "check"))
		return err
	}
	fmt.Fprintf(a.out, "%s: %s (%s)\n", node, plural(len(m.Findings), "finding"), plural(len(m.Checked), "check"))
	for _, f := range m.Findings {
		since := ""
		if f.Since != nil {
			since = ", since " + stamp(f.Since.AsTime())
		}
		fmt.Fprintf(a.out, "\n%s %s (%s%s)\n", painted(a.out, strings.ToUpper(word(f.Severity, "SEVERITY_"))), oneLine(f.What), f.Id, since)
		for _, part := range []struct{ label, text string }{{"why", f.Why}, {"next", f.Next}} {
			if part.text != "" {
				fmt.Fprintf(a.out, "  %-5s %s\n", part.label, here(node, oneLine(part.text)))
			}
		}
		for _, e := range f.Evidence {
			fmt.Fprintf(a.out, "  seen  %s\n", oneLine(e))
		}
	}
	return nil
}

// suggested is a command that acts on one node.
var suggested = regexp.MustCompile(`\bgbctl (apply-config|config|install|operation|reboot|reset|rollback|service|shutdown|time|upgrade)\b`)

// here is what a node says, with its name in the commands: the node doesn't know how this client reaches it.
func here(node, text string) string {
	named := "-n " + shellWord(node)
	text = strings.NewReplacer("-n ADDRESS", named, "-n NODE", named).Replace(text)
	return suggested.ReplaceAllString(text, "gbctl "+named+" $1")
}
