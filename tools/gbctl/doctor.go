package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

func (a *app) doctorCommand() *cobra.Command {
	return a.outputFlag(&cobra.Command{
		Use:  "doctor",
		RunE: func(cmd *cobra.Command, _ []string) error { return a.doctor(cmd.Context()) },
	})
}

func (a *app) doctor(ctx context.Context) error {
	answers, failed := gather(ctx, a, diagnose)
	unhealthy := false
	for _, n := range answers {
		for _, f := range n.value.Findings {
			unhealthy = unhealthy || f.Severity == apiv1.Finding_SEVERITY_ERROR
		}
	}
	if len(answers) == 0 {
		return failed
	}
	err := a.show(documents(answers), true, func() error {
		for i, n := range answers {
			if i > 0 {
				fmt.Fprintln(a.out)
			}
			a.findings(n.node, n.value)
		}
		return nil
	})
	if err = errors.Join(err, failed); err == nil && unhealthy {
		return &exitError{codeUnhealthy, nil}
	}
	return err
}

var diagnose = asking(ofNode, nodeAPI.Diagnose, &apiv1.DiagnoseRequest{})

func (a *app) findings(node string, m *apiv1.DiagnoseResponse) {
	if len(m.Findings) == 0 {
		fmt.Fprintf(a.out, "%s: nothing is wrong (%s)\n", node, plural(len(m.Checked), "check"))
		return
	}
	fmt.Fprintf(a.out, "%s: %s (%s)\n", node, plural(len(m.Findings), "finding"), plural(len(m.Checked), "check"))
	// Texts that the node sends don't know how this client reaches the node.
	here := strings.NewReplacer("-n ADDRESS", "-n "+node)
	for _, f := range m.Findings {
		since := ""
		if f.Since != nil {
			since = ", since " + stamp(f.Since.AsTime())
		}
		fmt.Fprintf(a.out, "\n%s %s (%s%s)\n", painted(a.out, strings.ToUpper(word(f.Severity, "SEVERITY_"))), oneLine(f.What), f.Id, since)
		for _, part := range []struct{ label, text string }{{"why", f.Why}, {"next", f.Next}} {
			if part.text != "" {
				fmt.Fprintf(a.out, "  %-5s %s\n", part.label, here.Replace(oneLine(part.text)))
			}
		}
		for _, e := range f.Evidence {
			fmt.Fprintf(a.out, "  seen  %s\n", oneLine(e))
		}
	}
}
