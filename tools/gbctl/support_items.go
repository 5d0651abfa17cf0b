package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/proto"
)

const (
	// supportItem limits one file: only the end of a longer one is kept, because the
	// newest lines of a log are the most useful.
	supportItem = 8 << 20

	// maxUnanswered is the number of unanswered requests in a row after which no more are
	// sent to a node: each one takes as long as --timeout.
	maxUnanswered = 4

	supportEvents = 1000 // of all services; a boot has 60
)

// item is one file of a bundle. Collecting it can add more items.
type item struct {
	name    string
	collect func(ctx context.Context, n *supportNode, w io.Writer) error
}

// supportItems is all that is asked for. The order is that in which a node is
// asked: what is lost when it dies meanwhile is at the end.
var supportItems = []item{
	{"status.yaml", answerOf(status)},
	{"services.yaml", answerOf(services(&apiv1.ListServicesRequest{Events: shownEvents}))},
	{"doctor.yaml", answerOf(diagnose)},
	{"events.log", supportEventsLog},
	{"dmesg.log", supportDmesg},
	{"logs/", func(ctx context.Context, n *supportNode, _ io.Writer) error { return n.logs(ctx, false) }},
	{"logs/kubernetes/", func(ctx context.Context, n *supportNode, _ io.Writer) error { return n.logs(ctx, true) }},
	{"resources/", supportResources},
	{"config/config.yaml", textOf(asking(ofConfig, configAPI.Get, &apiv1.GetConfigRequest{Redact: true}), (*apiv1.GetConfigResponse).GetDocument)},
	{"config/history.yaml", answerOf(history)},
	{"containers-system.yaml", answerOf(asking(ofNode, nodeAPI.Containers, &apiv1.ContainersRequest{}))},
	{"containers-kubernetes.yaml", answerOf(asking(ofNode, nodeAPI.Containers, &apiv1.ContainersRequest{Kubernetes: true}))},
	{"images-system.yaml", answerOf(asking(ofImage, imageAPI.List, &apiv1.ImagesRequest{}))},
	{"images-kubernetes.yaml", answerOf(asking(ofImage, imageAPI.List, &apiv1.ImagesRequest{Kubernetes: true}))},
	{"processes.yaml", answerOf(processes)},
	{"memory.yaml", answerOf(memory)},
	{"mounts.yaml", answerOf(mounts)},
	{"disks.yaml", answerOf(disks)},
	{"netstat.yaml", answerOf(asking(ofNode, nodeAPI.Netstat, &apiv1.NetstatRequest{}))},
	{"time.yaml", answerOf(clock)},
	{"boot-chart.txt", textOf(asking(ofNode, nodeAPI.BootChart, &apiv1.BootChartRequest{}), (*apiv1.BootChartResponse).GetChart)},
	{"boot-chart.svg", textOf(asking(ofNode, nodeAPI.BootChart, &apiv1.BootChartRequest{Svg: true}), (*apiv1.BootChartResponse).GetChart)},
	{"graph-controllers.dot", textOf(asking(ofResource, resourceAPI.Graph, &apiv1.GraphRequest{}), (*apiv1.GraphResponse).GetDot)},
	{"graph-services.dot", textOf(asking(ofResource, resourceAPI.Graph, &apiv1.GraphRequest{Services: true}), (*apiv1.GraphResponse).GetDot)},
}

// answerOf makes an item from one answer, in the format of -o yaml.
func answerOf[M proto.Message](ask question[M]) func(context.Context, *supportNode, io.Writer) error {
	return func(ctx context.Context, n *supportNode, w io.Writer) error {
		m, err := ask(ctx, n.client)
		if err != nil {
			return err
		}
		return writeYAML(w, []*yaml.Node{document(n.report.node, m)})
	}
}

// textOf makes an item from a text in one answer.
func textOf[A any, T string | []byte](ask question[A], text func(A) T) func(context.Context, *supportNode, io.Writer) error {
	return func(ctx context.Context, n *supportNode, w io.Writer) error {
		return writeText(ctx, n.client, w, ask, text)
	}
}

func supportEventsLog(ctx context.Context, n *supportNode, w io.Writer) error {
	return client.Receive(ctx, n.client.Service.Events, &apiv1.EventsRequest{Tail: supportEvents}, func(e *apiv1.ServiceEvent) error {
		_, err := fmt.Fprintln(w, serviceLine(e))
		return err
	})
}

func supportDmesg(ctx context.Context, n *supportNode, w io.Writer) error {
	return client.Receive(ctx, n.client.Log.Dmesg, &apiv1.DmesgRequest{Tail: int32(n.bundle.lines)}, func(m *apiv1.KernelMessage) error {
		_, err := fmt.Fprintln(w, kernelLine(m))
		return err
	})
}

// logs lists the logs and adds an item for each.
func (n *supportNode) logs(ctx context.Context, kubernetes bool) error {
	m, err := client.Unary(ctx, n.client.Log.List, &apiv1.ListLogsRequest{Kubernetes: kubernetes})
	if err != nil {
		return err
	}
	for _, id := range m.Ids {
		name := "logs/" + fileName(id) + ".log"
		if kubernetes {
			namespace, container, _ := strings.Cut(id, "/")
			name = "logs/kubernetes/" + fileName(namespace) + "/" + fileName(container) + ".log"
		}
		n.enqueue(item{name, func(ctx context.Context, n *supportNode, w io.Writer) error {
			return client.Receive(ctx, n.client.Log.Read, &apiv1.ReadLogRequest{Id: id, Kubernetes: kubernetes, Tail: int32(n.bundle.lines)}, func(m *apiv1.LogChunk) error {
				if m.Lost > 0 {
					fmt.Fprintf(w, "(%d lines were lost here)\n", m.Lost)
				}
				for _, line := range m.Lines {
					if _, err := io.WriteString(w, line+"\n"); err != nil {
						return err
					}
				}
				return nil
			})
		}})
	}
	return nil
}

func supportResources(ctx context.Context, n *supportNode, _ io.Writer) error {
	m, err := client.Unary(ctx, n.client.Resource.Definitions, &apiv1.ListDefinitionsRequest{})
	if err != nil {
		return err
	}
	for _, d := range m.Definitions {
		n.enqueue(item{"resources/" + fileName(d.Type) + ".yaml", func(ctx context.Context, n *supportNode, w io.Writer) error {
			list, err := client.Unary(ctx, n.client.Resource.List, &apiv1.ListResourcesRequest{Type: d.Type})
			if err != nil {
				return err
			}
			var documents []*yaml.Node
			for _, r := range list.Items {
				document, err := envelope(n.report.node, r)
				if err != nil {
					return err
				}
				documents = append(documents, document)
			}
			return writeYAML(w, documents)
		}})
	}
	return nil
}

// nodeReport is the result of one node.
type nodeReport struct {
	node, folder string
	err          error        // why there is no data
	unanswered   atomic.Int32 // unanswered requests in a row

	mu      sync.Mutex // guards what follows, while it is being collected
	files   []fileReport
	missing []fileError
}

type fileReport struct {
	name    string
	secrets map[string]int
}

type fileError struct {
	name string
	err  error
}

// errors is the content of errors.txt.
func (r *nodeReport) errors() []byte {
	if len(r.missing) == 0 {
		return []byte("Everything could be collected.\n")
	}
	slices.SortFunc(r.missing, func(a, b fileError) int { return strings.Compare(a.name, b.name) })
	var b strings.Builder
	for _, m := range r.missing {
		fmt.Fprintf(&b, "%s: %s\n", m.name, oneLine(m.err.Error()))
	}
	text, _ := scrub([]byte(b.String()))
	return text
}

// supportNode collects from one node.
type supportNode struct {
	ctx    context.Context // of the whole node
	bundle *bundle
	client *client.Client
	report *nodeReport
	slots  chan struct{} // perNode
	wg     sync.WaitGroup

	mu    sync.Mutex     // guards names
	names map[string]int // number of items with each name
}

// node collects from one node. The error is why there is no data.
func (s *bundle) node(ctx context.Context, r *nodeReport) error {
	c, err := s.app.dial(r.node)
	if err == nil {
		defer c.Close()
		n := &supportNode{ctx: ctx, bundle: s, client: c, report: r, slots: make(chan struct{}, perNode), names: map[string]int{}}
		err = n.all(ctx)
	}
	r.err = err
	return err
}

// all requests the version first: if the node can't be reached, the other fifty requests
// aren't sent.
func (n *supportNode) all(ctx context.Context) error {
	n.one(ctx, item{"version.yaml", supportVersion})
	if len(n.report.missing) > 0 {
		if err := n.report.missing[0].err; unanswered(err) || exitCode(err) == codeDenied {
			return err
		}
	}
	for _, it := range supportItems {
		n.wg.Go(func() { n.one(ctx, it) })
	}
	n.wg.Wait()
	if r := n.report; len(r.files) == 0 && len(r.missing) > 0 && ctx.Err() == nil {
		return r.missing[0].err
	}
	return ctx.Err()
}

// unanswered reports whether an error means that the node didn't answer.
func unanswered(err error) bool {
	return exitCode(err) == codeUnreachable || errors.Is(err, context.DeadlineExceeded)
}

// supportVersion connects like all other commands, so that errors of the connection are
// explained.
func supportVersion(ctx context.Context, n *supportNode, w io.Writer) error {
	return n.bundle.app.withClient(ctx, n.report.node, func(ctx context.Context, c *client.Client) error {
		m, err := client.Unary(ctx, c.Node.Version, &apiv1.VersionRequest{})
		if err != nil {
			return err
		}
		return writeYAML(w, []*yaml.Node{document(n.report.node, m)})
	})
}

// enqueue adds an item that was found on the node. It makes its name unique.
func (n *supportNode) enqueue(it item) {
	n.mu.Lock()
	n.names[it.name]++
	count := n.names[it.name]
	n.mu.Unlock()
	if count > 1 {
		ending := path.Ext(it.name)
		it.name = fmt.Sprintf("%s-%d%s", strings.TrimSuffix(it.name, ending), count, ending)
	}
	n.wg.Go(func() { n.one(n.ctx, it) })
}

var errSkipped = errors.New("skipped: the node had stopped answering")

// one collects one item, within the timeout.
func (n *supportNode) one(ctx context.Context, it item) {
	n.bundle.count(1, 0)
	defer n.bundle.count(0, 1)
	for _, slots := range []chan struct{}{n.slots, n.bundle.slots} {
		slots <- struct{}{}
		defer func() { <-slots }()
	}
	if ctx.Err() != nil || n.bundle.writeError() != nil {
		return
	}
	w := &tailBuffer{}
	err := errSkipped
	if n.report.unanswered.Load() < maxUnanswered {
		ctx, cancel := context.WithTimeout(ctx, n.bundle.app.timeout)
		err = n.bundle.app.explain(n.report.node, it.collect(ctx, n, w))
		cancel()
		if n.report.unanswered.Add(1); err == nil || !unanswered(err) {
			n.report.unanswered.Store(0)
		}
	}
	if err == nil && w.lost > 0 {
		err = fmt.Errorf("only the last %s are included: the first %s are left out", size(uint64(w.kept.Len())), size(uint64(w.lost)))
	}
	file := fileReport{name: it.name}
	listing := strings.HasSuffix(it.name, "/")
	if !listing && (err == nil || w.kept.Len() > 0) {
		var text []byte
		text, file.secrets = scrub(w.kept.Bytes())
		n.bundle.add(n.report.folder+"/"+it.name, text)
	}
	n.report.mu.Lock()
	defer n.report.mu.Unlock()
	if err != nil {
		n.report.missing = append(n.report.missing, fileError{it.name, err})
	}
	if !listing && (err == nil || w.kept.Len() > 0) {
		n.report.files = append(n.report.files, file)
	}
}

// tailBuffer keeps the last supportItem bytes, from the start of a line.
type tailBuffer struct {
	kept bytes.Buffer
	lost int
}

func (e *tailBuffer) Write(p []byte) (int, error) {
	e.kept.Write(p)
	if e.kept.Len() > 2*supportItem {
		e.lost += len(e.kept.Next(e.kept.Len() - supportItem))
		e.lost += len(e.kept.Next(bytes.IndexByte(e.kept.Bytes(), '\n') + 1))
	}
	return len(p), nil
}
