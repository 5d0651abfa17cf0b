package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/spf13/cobra"
)

// shownEvents is the number of events of a service that fit on a screen.
const shownEvents = 20

func (a *app) servicesCommand() *cobra.Command {
	head := []string{"ID", "STATE", "HEALTH", "LAST CHANGE", "LAST EVENT"}
	return listCommand(a, "services", head, services(&apiv1.ListServicesRequest{}), func(m *apiv1.ListServicesResponse) [][]string {
		return ofEach(m.Services, func(s *apiv1.Service) []string {
			return []string{s.Id, s.State, s.Health, ago(m.SinceBoot, s.Since), s.Message}
		})
	})
}

func services(r *apiv1.ListServicesRequest) question[*apiv1.ListServicesResponse] {
	return asking(ofService, serviceAPI.List, r)
}

var actions = map[string]apiv1.ControlServiceRequest_Action{
	"start":   apiv1.ControlServiceRequest_ACTION_START,
	"stop":    apiv1.ControlServiceRequest_ACTION_STOP,
	"restart": apiv1.ControlServiceRequest_ACTION_RESTART,
}

func (a *app) serviceCommand() *cobra.Command {
	var force bool
	cmd := command("service ID [start|stop|restart]", func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			return a.service(cmd.Context(), args[0])
		}
		action, ok := actions[args[1]]
		if swapped := actions[args[0]] != 0; !ok && swapped {
			return didYouMean("the service is named first", a.moved(cmd, args[0], []string{"service", args[1], args[0]}))
		} else if slices.Contains(args, "status") {
			return didYouMean("without a verb, it shows the status", a.instead("status"))
		} else if !ok {
			return a.closest(usagef("service %s %s: must be start, stop or restart", args[0], args[1]), args[1], slices.Sorted(maps.Keys(actions)))
		}
		if err := a.named(cmd.Context(), cmd.CommandPath()+" "+strings.Join(args, " "), action == actions["start"], false); err != nil {
			return err
		}
		return printEach(cmd.Context(), a, asking(ofService, serviceAPI.Control, &apiv1.ControlServiceRequest{Id: args[0], Action: action, Force: force}), func(m *apiv1.ControlServiceResponse) []string { return []string{m.Message} })
	})
	cmd.ValidArgsFunction = completing(a, services(&apiv1.ListServicesRequest{}), serviceIDs, "start", "stop", "restart")
	a.stopFlags(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "stop or restart etcd also if the cluster loses its quorum")
	return a.outputFlag(cmd)
}

// serviceIDs are the IDs of the services in an answer.
func serviceIDs(m *apiv1.ListServicesResponse) []string {
	return ofEach(m.GetServices(), (*apiv1.Service).GetId)
}

func (a *app) service(ctx context.Context, id string) error {
	answers, failed := gather(ctx, a, services(&apiv1.ListServicesRequest{Id: id, Events: shownEvents}))
	return showBlocks(a, answers, failed, func(node string, m *apiv1.ListServicesResponse) error {
		for _, s := range m.Services { // one
			if err := a.serviceBlock(node, s, m); err != nil {
				return err
			}
		}
		return nil
	})
}

// serviceBlock prints one service, one property per line.
func (a *app) serviceBlock(node string, s *apiv1.Service, m *apiv1.ListServicesResponse) error {
	kind := s.Kind
	if s.Restarts > 0 {
		kind += fmt.Sprintf(" (restarted %s)", plural(int(s.Restarts), "time"))
	}
	t := tabwriter.NewWriter(a.out, 0, 8, 3, ' ', 0)
	for _, line := range [][2]string{{"NODE", node}, {"ID", s.Id}, {"STATE", s.State}, {"HEALTH", s.Health}, {"KIND", kind}} {
		fmt.Fprintf(t, "%s\t%s\n", line[0], paintedIn(a.out, line[0], oneLine(line[1])))
	}
	label := "EVENTS"
	for _, e := range s.Events {
		fmt.Fprintf(t, "%s\t[%s]: %s (%s)\n", label, e.State, here(node, oneLine(e.Message)), ago(m.SinceBoot, e.SinceBoot))
		label = ""
	}
	if len(s.Events) == 0 {
		fmt.Fprintf(t, "%s\n", label)
	}
	return t.Flush()
}
