package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/boot"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// orders are the sort orders of processes, the largest first except by PID.
var orders = map[string]func(a, b *apiv1.Process) int{
	"rss": func(a, b *apiv1.Process) int { return cmp.Compare(b.ResidentMemory, a.ResidentMemory) },
	"cpu": func(a, b *apiv1.Process) int {
		return cmp.Compare(b.CpuTime.AsDuration(), a.CpuTime.AsDuration())
	},
	"pid": func(a, b *apiv1.Process) int { return cmp.Compare(a.Pid, b.Pid) },
}

func (a *app) processesCommand() *cobra.Command {
	var by string
	cmd := command("processes", func(cmd *cobra.Command, _ []string) error {
		head := []string{"PID", "PARENT", "STATE", "THREADS", "CPU TIME", "VIRTUAL", "RESIDENT", "COMMAND"}
		return list(cmd.Context(), a, head, processes, func(m *apiv1.ProcessesResponse) (rows [][]string) {
			slices.SortStableFunc(m.Processes, orders[by])
			for _, p := range m.Processes {
				rows = append(rows, []string{strconv.Itoa(int(p.Pid)), strconv.Itoa(int(p.Ppid)), p.State, strconv.Itoa(int(p.Threads)),
					p.CpuTime.AsDuration().Round(10 * time.Millisecond).String(), size(p.VirtualMemory), size(p.ResidentMemory), commandOf(p)})
			}
			return rows
		})
	})
	cmd.Aliases = []string{"ps"}
	choiceFlag(cmd, &by, "sort", "", "sort order: rss, cpu or pid", "rss", "cpu", "pid")
	return a.outputFlag(cmd)
}

// commandOf is how a process was started. The arguments of pods' processes aren't known, and one program may have many
// names.
func commandOf(p *apiv1.Process) string {
	if p.Args == "" && p.Executable != "" && !strings.HasPrefix(path.Base(p.Executable), p.Command) {
		return fmt.Sprintf("%s (%s)", p.Executable, p.Command)
	}
	return cmp.Or(p.Args, p.Executable, p.Command)
}

func (a *app) memoryCommand() *cobra.Command {
	return listCommand(a, "memory", []string{"TOTAL", "USED", "AVAILABLE", "FREE", "BUFFERS", "CACHED", "PID 1"}, memory, func(m *apiv1.MemoryResponse) [][]string {
		i := m.Meminfo
		used := i["MemTotal"] - min(i["MemAvailable"], i["MemTotal"])
		return [][]string{{size(i["MemTotal"]), size(used), size(i["MemAvailable"]), size(i["MemFree"]), size(i["Buffers"]), size(i["Cached"]), size(m.Pid1Pss)}}
	})
}

func (a *app) mountsCommand() *cobra.Command {
	return listCommand(a, "mounts", []string{"MOUNTED ON", "SOURCE", "TYPE", "SIZE", "AVAILABLE", "USED"}, mounts, rowsOf((*apiv1.MountsResponse).GetMounts, mountRow))
}

func mountRow(m *apiv1.Mount) []string {
	if m.Size == 0 {
		return []string{m.Target, m.Source, m.Type, "", "", ""}
	}
	used := 100 * float64(m.Size-min(m.Available, m.Size)) / float64(m.Size)
	return []string{m.Target, m.Source, m.Type, size(m.Size), size(m.Available), fmt.Sprintf("%.0f%%", used)}
}

func (a *app) disksCommand() *cobra.Command {
	return a.insecureFlags(listCommand(a, "disks", []string{"DEVICE", "SIZE", "MODEL", "SERIAL", "BUS", "READ-ONLY", "SYSTEM", "CONTENT"}, disks, rowsOf((*apiv1.DisksResponse).GetDisks, func(d *apiv1.Disk) []string {
		return []string{d.Device, size(d.Size), d.Model, d.Serial, d.Bus, yes(d.ReadOnly), yes(d.System), d.Content}
	})))
}

func (a *app) netstatCommand() *cobra.Command {
	r := &apiv1.NetstatRequest{}
	cmd := listCommand(a, "netstat", []string{"PROTOCOL", "LOCAL", "REMOTE", "STATE", "RECEIVE QUEUE", "SEND QUEUE", "PROCESS"}, asking(ofNode, nodeAPI.Netstat, r), rowsOf((*apiv1.NetstatResponse).GetSockets, func(s *apiv1.Socket) []string {
		process := ""
		if s.Pid > 0 {
			process = fmt.Sprintf("%d/%s", s.Pid, s.Command)
		}
		return []string{s.Protocol, s.Local, s.Remote, s.State, strconv.FormatUint(s.ReceiveQueue, 10), strconv.FormatUint(s.SendQueue, 10), process}
	}))
	cmd.Flags().BoolVarP(&r.ListeningOnly, "listening", "l", false, "show only listening sockets")
	return cmd
}

func (a *app) timeCommand() *cobra.Command {
	set := command("set [TIME]", func(cmd *cobra.Command, args []string) (err error) {
		to := time.Now()
		if len(args) > 0 {
			if to, err = time.Parse(time.RFC3339, args[0]); err != nil {
				return usagef("%s isn't a time such as 2026-11-30T08:15:00Z (RFC 3339)", args[0])
			}
		}
		return printMessage(cmd.Context(), a, "time set", asking(ofNode, nodeAPI.SetTime, &apiv1.SetTimeRequest{Time: timestamppb.New(to)}))
	})
	show := listCommand(a, "time", []string{"TIME", "SYNCED", "SERVER", "OFFSET", "ERROR", "MESSAGE"}, clock, func(m *apiv1.TimeResponse) [][]string {
		return [][]string{{stampUTC(m.Now.AsTime()), strconv.FormatBool(m.Synced), m.Server, m.Offset.AsDuration().String(), m.Error.AsDuration().String(), m.Message}}
	})
	show.AddCommand(set)
	return show
}

func (a *app) containersCommand() *cobra.Command {
	r := &apiv1.ContainersRequest{}
	cmd := listCommand(a, "containers", []string{"NAMESPACE", "ID", "IMAGE", "PID", "STATUS"}, asking(ofNode, nodeAPI.Containers, r), rowsOf((*apiv1.ContainersResponse).GetContainers, func(c *apiv1.Container) []string {
		id := c.Id
		if c.InPod {
			id = "└─ " + id
		}
		return []string{c.Namespace, id, c.Image, strconv.Itoa(int(c.Pid)), c.Status}
	}))
	cmd.Aliases = []string{"c"}
	cmd.Flags().BoolVarP(&r.Kubernetes, "kubernetes", "k", false, "show the containers of Kubernetes")
	return cmd
}

// Questions that commands and support bundles share.
var (
	processes = asking(ofNode, nodeAPI.Processes, &apiv1.ProcessesRequest{})
	memory    = asking(ofNode, nodeAPI.Memory, &apiv1.MemoryRequest{})
	mounts    = asking(ofNode, nodeAPI.Mounts, &apiv1.MountsRequest{})
	disks     = asking(ofNode, nodeAPI.Disks, &apiv1.DisksRequest{})
	clock     = asking(ofNode, nodeAPI.Time, &apiv1.TimeRequest{})
)

// shortDigest shortens a digest for tables.
func shortDigest(digest string) string {
	algorithm, sum, ok := strings.Cut(digest, ":")
	if !ok || len(sum) < 12 {
		return digest
	}
	return algorithm + ":" + sum[:12]
}

func (a *app) versionCommand() *cobra.Command {
	var own bool
	cmd := command("version", func(cmd *cobra.Command, _ []string) error {
		return a.version(cmd.Context(), own)
	})
	cmd.Flags().BoolVar(&own, "client", false, "show only the release of gbctl")
	return a.insecureFlags(a.outputFlag(cmd))
}

func (a *app) version(ctx context.Context, own bool) error {
	head := []string{"NODE", "VERSION", "PLATFORM", "KERNEL", "MODE", "HOSTNAME"}
	platform := runtime.GOOS + "/" + runtime.GOARCH
	rows := [][]string{{"gbctl", boot.Version, platform, "", "", ""}}
	documents := []*yaml.Node{mapping("client", mapping("version", boot.Version, "platform", platform, "goVersion", runtime.Version()))}
	var failed error
	if !own {
		answers, err := gather(ctx, a, asking(ofNode, nodeAPI.Version, &apiv1.VersionRequest{}))
		if errors.Is(err, fs.ErrNotExist) && len(a.nodes) == 0 {
			// After the installation of gbctl there is no client configuration yet.
			fmt.Fprintln(a.notes(), "no node was asked:", err)
		} else {
			failed = err
		}
		for _, n := range answers {
			v := n.value
			rows = append(rows, []string{n.node, v.Version, v.Platform, v.Kernel, v.Mode, v.Hostname})
			documents = append(documents, document(n.node, v))
		}
	}
	return errors.Join(a.show(documents, own, func() error { return table(a.out, head, rows) }), failed)
}
