package qemu

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
	"gopkg.in/yaml.v3"
)

const (
	readyPoll = 200 * time.Millisecond
	// readyPollEmulated is longer: an answer costs an emulated API server half a second of
	// its processors, which it needs for its own start.
	readyPollEmulated = 3 * time.Second
	// answerBudget is for one request to an API server that may be starting.
	answerBudget = 5 * time.Second
	answerLimit  = 16 << 20 // bytes of one list
)

// The milestones of WaitReady, in this order.
const (
	MilestoneAPI   = "Kubernetes API answers"
	MilestoneReady = "node Ready" // "all nodes Ready" where there are several
	MilestoneDNS   = "cluster DNS answers"
)

// A Milestone is a state that a new cluster reaches.
type Milestone struct {
	What  string
	After time.Duration // since the wait began
}

// WaitReady returns once the API answers, every planned node is Ready and the cluster's DNS
// runs. It calls reached for each milestone, and waiting after each attempt with what is
// still missing. Both may be nil. It returns an error when the cluster ends.
func (c *Cluster) WaitReady(ctx context.Context, reached func(Milestone), waiting func(error)) error {
	api, err := c.KubeAPI()
	if err != nil {
		return err
	}
	poll := readyPoll
	if c.Accelerator == "tcg" {
		poll = readyPollEmulated
	}
	steps, err := c.milestones(api)
	if err != nil {
		return err
	}
	start := time.Now()
	for _, step := range steps {
		for {
			err := step.check(ctx)
			if err == nil {
				break
			}
			if ended := c.ended(); ended != nil {
				return ended
			}
			if waiting != nil {
				waiting(err)
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("waiting for %s: %w; the last answer: %w", step.what, ctx.Err(), err)
			case <-time.After(poll):
			}
		}
		if reached != nil {
			reached(Milestone{step.what, time.Since(start)})
		}
	}
	return nil
}

// milestone is one of WaitReady and what tells that it is reached.
type milestone struct {
	what  string
	check func(context.Context) error
}

// milestones returns those that a cluster can reach: without a pod network no node is Ready.
func (c *Cluster) milestones(api *KubeAPI) ([]milestone, error) {
	name := c.Configuration(c.Nodes[0].Name)
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	first, _, err := config.Load(name, data)
	if err != nil {
		return nil, err
	}
	network := first.Cluster.Network.CNI.Name != config.CNINone
	ready := MilestoneReady
	switch nodes := len(c.atOnce()); {
	case !network:
		ready = "all nodes wait for a pod network, which is yours to install"
	case nodes > 1:
		ready = "all nodes Ready"
	}
	all := []milestone{
		{MilestoneAPI, api.answers},
		{ready, func(ctx context.Context) error {
			var since time.Time
			if c.Provisioner == Container { // machines have clocks of their own
				since = heldSince(c.dir.lock())
			}
			return api.nodesReady(ctx, len(c.atOnce()), network, since)
		}},
	}
	if network && !first.Cluster.CoreDNS.Disabled {
		all = append(all, milestone{MilestoneDNS, api.dnsReady})
	}
	return all, nil
}

// ended returns the reason why a cluster can't become ready any more; nil while it has a
// host process.
func (c *Cluster) ended() error {
	pid, err := c.HostPID()
	if err != nil || pid != 0 {
		return err
	}
	if _, err := readPlan(c.dir); errors.Is(err, ErrNoCluster) {
		return fmt.Errorf("cluster %s was removed meanwhile, by another command", c.Name)
	}
	return fmt.Errorf("cluster %s was stopped meanwhile, or its host process crashed: %s has the reason; create it again to start it", c.Name, c.dir.log())
}

// Chart returns the file with the chart of a node's last boot. The node writes it once all
// its services are up.
func (c *Cluster) Chart(node string) string {
	if c.Provisioner == Container {
		return filepath.Join(c.dir.ephemeral(node), "log", "boot-chart.svg")
	}
	return c.dir.chart(node)
}

// KubeAPI is a client of the Kubernetes API, as an administrator, with the cluster's own
// kubeconfig.
type KubeAPI struct {
	server string
	trust  *tls.Config
	client *http.Client
}

// KubeAPI reads the kubeconfig that create wrote.
func (c *Cluster) KubeAPI() (*KubeAPI, error) {
	data, err := os.ReadFile(c.Kubeconfig())
	if err != nil {
		return nil, err
	}
	var k config.Kubeconfig
	if err := yaml.Unmarshal(data, &k); err != nil {
		return nil, fmt.Errorf("%s: %w", c.Kubeconfig(), err)
	}
	if len(k.Clusters) == 0 || len(k.Users) == 0 {
		return nil, fmt.Errorf("%s: no cluster or no user in it", c.Kubeconfig())
	}
	var decoded [3][]byte
	for i, text := range []string{k.Clusters[0].Cluster.CA, k.Users[0].User.Crt, k.Users[0].User.Key} {
		if decoded[i], err = base64.StdEncoding.DecodeString(text); err != nil {
			return nil, fmt.Errorf("%s: %w", c.Kubeconfig(), err)
		}
	}
	pair, err := tls.X509KeyPair(decoded[1], decoded[2])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.Kubeconfig(), err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(decoded[0])
	trust := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}
	return &KubeAPI{
		server: k.Clusters[0].Cluster.Server,
		trust:  trust,
		client: &http.Client{
			Timeout: answerBudget,
			// No proxy: one of the user's environment can't connect to this machine's
			// loopback.
			Transport: &http.Transport{TLSClientConfig: trust},
		},
	}, nil
}

// StatusError is an answer of the API server that isn't a success.
type StatusError struct {
	Code int
	body string
	text string
}

func (e *StatusError) Error() string { return e.text }

// Do sends a request with a body, nil: none, and reads the answer into to, nil: only the status
// counts. Both are JSON. It may take as long as the server of a cluster that starts needs.
func (a *KubeAPI) Do(ctx context.Context, method, path string, body, to any) error {
	var text []byte
	var err error
	if body != nil {
		text, err = json.Marshal(body)
	}
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, a.server+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/apply-patch+yaml") // JSON is YAML
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, answerLimit))
	switch {
	case err != nil:
		return err
	case resp.StatusCode >= http.StatusMultipleChoices:
		var status struct{ Message string }
		_ = json.Unmarshal(answer, &status)
		return &StatusError{resp.StatusCode, string(answer), fmt.Sprintf("%s %s: %s: %s", method, path, resp.Status, cmp.Or(status.Message, said(string(answer))))}
	case to == nil:
		return nil
	}
	return json.Unmarshal(answer, to)
}

// said is the first line of an answer that isn't a check which passed: /readyz lists them all.
func said(body string) string {
	for line := range strings.Lines(body) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "[+]") {
			return line
		}
	}
	return ""
}

func (a *KubeAPI) answers(ctx context.Context) error {
	err := a.Do(ctx, http.MethodGet, "/readyz", nil, nil)
	status, ok := errors.AsType[*StatusError](err)
	if !ok {
		return err
	}
	check, _, _ := strings.Cut(strings.TrimPrefix(said(status.body), "[-]"), " failed: ")
	return fmt.Errorf("the API server starts: %s isn't done", cmp.Or(check, http.StatusText(status.Code)))
}

// condition is a condition of a node or a deployment, as in the Kubernetes API.
type condition struct {
	Type, Status, Message string
	LastHeartbeatTime     time.Time
}

// holds returns nil if the condition is true, and otherwise an error with the reason.
func holds(conditions []condition, want string) error {
	for _, c := range conditions {
		if c.Type != want {
			continue
		}
		if c.Status == "True" {
			return nil
		}
		return fmt.Errorf("not %s: %s", want, c.Message)
	}
	return fmt.Errorf("not %s", want)
}

// nodesReady returns nil if as many nodes are Ready, or lack only the network of a cluster without one. What their
// kubelets said before this run of the cluster doesn't count.
func (a *KubeAPI) nodesReady(ctx context.Context, count int, network bool, since time.Time) error {
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct{ Conditions []condition }
		}
	}
	if err := a.Do(ctx, http.MethodGet, "/api/v1/nodes", nil, &list); err != nil {
		return err
	}
	if len(list.Items) < count {
		return fmt.Errorf("%d of %d nodes have registered", len(list.Items), count)
	}
	var unready []error
	for _, n := range list.Items {
		err := holds(n.Status.Conditions, "Ready")
		if slices.ContainsFunc(n.Status.Conditions, func(c condition) bool {
			return c.Type == "Ready" && c.LastHeartbeatTime.Before(since.Truncate(time.Second))
		}) {
			err = errors.New("not Ready: its kubelet hasn't reported since the cluster was started")
		}
		if err != nil && (network || !strings.Contains(err.Error(), "NetworkPluginNotReady")) {
			unready = append(unready, fmt.Errorf("node %s is %w", n.Metadata.Name, err))
		}
	}
	return errors.Join(unready...)
}

func (a *KubeAPI) dnsReady(ctx context.Context) error {
	var deployment struct {
		Status struct{ Conditions []condition }
	}
	if err := a.Do(ctx, http.MethodGet, "/apis/apps/v1/namespaces/kube-system/deployments/coredns", nil, &deployment); err != nil {
		return err
	}
	if err := holds(deployment.Status.Conditions, "Available"); err != nil {
		return fmt.Errorf("deployment coredns is %w", err)
	}
	return nil
}
