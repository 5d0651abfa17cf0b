package main

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

// pollInterval is how often gbctl asks a node while it waits for it: short enough for the
// user, and little load for the node.
const pollInterval = time.Second

func (a *app) healthCommand() *cobra.Command {
	var wait time.Duration
	cmd := command("health", func(cmd *cobra.Command, _ []string) error { return a.health(cmd.Context(), wait) })
	cmd.Flags().DurationVar(&wait, "wait", 0, "wait until the nodes are healthy, at most this long")
	return a.insecureFlags(a.outputFlag(cmd))
}

var status = asking(ofNode, nodeAPI.Status, &apiv1.NodeStatusRequest{})

// unhealthyReason returns why a node isn't healthy, or an empty text.
func unhealthyReason(s *apiv1.NodeStatusResponse) string {
	switch {
	case s.Stage == "maintenance":
		return "waits for a configuration ('gbctl -n ADDRESS apply-config --insecure -f FILE')"
	case s.Stage == "locked":
		return "waits for its recovery key ('gbctl -n ADDRESS unlock --insecure')"
	case s.WaitingFor != "" && s.KubernetesLacks != "":
		return s.WaitingFor + "; " + s.KubernetesLacks
	case s.WaitingFor != "":
		return s.WaitingFor
	case s.ServicesUp < s.Services:
		return fmt.Sprintf("%d of %d services aren't up", s.Services-s.ServicesUp, s.Services)
	}
	return s.KubernetesLacks
}

// healthyAs is nil if a node is healthy, apart from what Kubernetes lacked there before a command, too.
func healthyAs(before, s *apiv1.NodeStatusResponse) error {
	isNew := func(object string) bool { return !slices.Contains(before.KubernetesFaulty, object) }
	if before.KubernetesLacks != "" && !slices.ContainsFunc(s.KubernetesFaulty, isNew) {
		s.KubernetesLacks = ""
	}
	if why := unhealthyReason(s); why != "" {
		return notHealthy{errors.New(why)}
	}
	return nil
}

// notHealthy is the error of a node that answers.
type notHealthy struct{ error }

func (a *app) health(ctx context.Context, wait time.Duration) error {
	deadline := time.Now().Add(wait)
	var retries retryLog
	for {
		answers, failed := gather(ctx, a, status)
		cause := failed
		for _, n := range answers {
			if why := unhealthyReason(n.value); why != "" {
				cause = errors.Join(cause, fmt.Errorf("%s: %s", n.node, why))
			}
		}
		if cause == nil || time.Until(deadline) < pollInterval {
			return a.showHealth(answers, failed)
		}
		retries.print(a.notes(), cause)
		if err := pause(ctx, pollInterval); err != nil {
			return err
		}
	}
}

// kubernetesWords are shown for whether Kubernetes serves on a node; a node of an earlier release doesn't say it.
var kubernetesWords = map[string]string{"yes": "serves", "no": "doesn't serve", "unknown": "unknown"}

func (a *app) showHealth(answers []answer[*apiv1.NodeStatusResponse], failed error) error {
	head := []string{"HOSTNAME", "TYPE", "STAGE", "SERVICES UP", "KUBERNETES", "LOAD", "MEMORY FREE", "UPTIME", "WAITS FOR"}
	err := showRows(a, answers, head, func(s *apiv1.NodeStatusResponse) [][]string {
		return [][]string{{s.Hostname, s.MachineType, s.Stage, fmt.Sprintf("%d/%d", s.ServicesUp, s.Services), kubernetesWords[s.KubernetesServes],
			fmt.Sprintf("%.2f", s.Load1), size(s.MemoryAvailable), span(s.Uptime.AsDuration()), unhealthyReason(s)}}
	})
	for _, n := range answers {
		for _, notice := range n.value.Notices {
			fmt.Fprintf(a.notes(), "%s: %s\n", n.node, here(n.node, visible(notice)))
		}
	}
	unhealthy := slices.ContainsFunc(answers, func(n answer[*apiv1.NodeStatusResponse]) bool { return unhealthyReason(n.value) != "" })
	if err = errors.Join(err, failed); err == nil && unhealthy {
		return &exitError{codeUnhealthy, nil}
	}
	return err
}

// pause waits. It ends early if ctx is cancelled, for example with Ctrl-C.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

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
