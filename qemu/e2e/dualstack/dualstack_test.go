//go:build e2e && long

// Package dualstack tests clusters of two nodes whose networks have both address families, or
// IPv6 only: pods and Services of each family answer from both nodes.
package dualstack

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
)

func TestMain(m *testing.M) { e2etest.Main(m) }

const (
	podsBudget    = 60 * time.Second // for pods on a worker that has to pull their image first
	serviceBudget = 20 * time.Second // for kube-proxy and DNS to know them
)

// web is a server on each node, which listens at addresses of both families. It is its own client: the image has no shell.
const web = `
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: web, namespace: default}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 1
      tolerations: [{operator: Exists}]
      containers:
      - name: web
        image: IMAGE
        command: [/usr/local/bin/kubectl, proxy, "--address=[::]", --port=8080, --accept-hosts=.*, --www=/etc/pod, --www-prefix=/pod/]
        readinessProbe: {httpGet: {path: /pod/node, port: 8080}, periodSeconds: 1, timeoutSeconds: 5}
        volumeMounts: [{name: pod, mountPath: /etc/pod}]
      volumes:
      - name: pod
        downwardAPI: {items: [{path: node, fieldRef: {fieldPath: "metadata.labels['app']"}}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: default}
spec:
  type: NodePort
  ipFamilyPolicy: PreferDualStack
  selector: {app: web}
  ports: [{port: 80, targetPort: 8080}]
`

func TestBothFamilies(t *testing.T) {
	serves(t, "dual", netip.MustParsePrefix("10.5.0.0/24"), netip.MustParsePrefix("fd00:5::/64"))
}

func TestIPv6First(t *testing.T) {
	serves(t, "first", netip.MustParsePrefix("fd00:5::/64"), netip.MustParsePrefix("10.5.0.0/24"))
}

func TestIPv6Only(t *testing.T) {
	serves(t, "six", netip.MustParsePrefix("fd00:5::/64"), netip.Prefix{})
}

func serves(t *testing.T, name string, first, second netip.Prefix) {
	c, m := e2etest.Ready(t, name, qemu.Container, e2etest.Nodes(1, 1), func(o *qemu.Options) { o.Network, o.Second = first, second })
	for _, n := range c.Nodes {
		want := []string{n.Address.String()}
		if n.Second.IsValid() {
			want = append(want, n.Second.String())
		}
		got := strings.Fields(c.Kubectl("get", "node", n.Name, "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`))
		if !slices.Equal(got, want) {
			t.Errorf("addresses of %s are %q, want %q", n.Name, got, want)
		}
		address := n.Address.String()
		c.Eventually(time.Minute, n.Name+" has its certificate", func() error {
			_, err := c.TryGbctl("-n", address, "services")
			return err
		})
		if out := c.Gbctl("-n", address, "doctor"); strings.Contains(out, "no-family") {
			t.Error(out)
		}
	}
	c.Apply(strings.ReplaceAll(web, "IMAGE", config.DefaultAPIServerImage))
	families := 1
	if second.IsValid() {
		families = 2
	}
	var pods []pod
	c.Eventually(podsBudget, "a web pod is ready on each node, with an address of each family", func() (err error) {
		if pods, err = ready(c); err != nil {
			return err
		}
		for _, p := range pods {
			if len(p.ips) != families || p.ips[0].Is4() != first.Addr().Is4() {
				t.Fatalf("addresses of %s: %v", p.name, p.ips)
			}
		}
		if len(pods) != len(c.Nodes) {
			err = fmt.Errorf("ready are %v", pods)
		}
		return err
	})
	m.Reached("pods are ready on both")
	at := servers(c, pods)
	for _, from := range pods {
		if log := c.Kubectl("logs", from.name); !strings.Contains(log, "Starting to serve") {
			t.Errorf("log of %s: %q", from.name, log)
		}
		for _, url := range at {
			c.Eventually(serviceBudget, from.name+" gets an answer from "+url, func() error {
				out, err := c.Try("exec", from.name, "--", "/usr/local/bin/kubectl", "--server="+url, "--request-timeout=5s", "get", "--raw", "/pod/node")
				if err == nil && out != "web" {
					err = fmt.Errorf("it answers %q", out)
				}
				return err
			})
		}
	}
	c.Healthy()
	m.Reached(fmt.Sprintf("%d addresses and names answer from both nodes", len(at)))
}

// servers are all places at which the pods serve: their own addresses, those of the Service, its name, and its port on each node.
func servers(c *e2etest.Cluster, pods []pod) []string {
	at := []string{"http://web"}
	add := func(host, port string) { at = append(at, "http://"+net.JoinHostPort(host, port)) }
	for _, p := range pods {
		for _, ip := range p.ips {
			add(ip.String(), "8080")
		}
	}
	for _, ip := range strings.Fields(c.Kubectl("get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[*]}")) {
		add(ip, "80")
	}
	port := c.Kubectl("get", "service", "web", "-o", "jsonpath={.spec.ports[0].nodePort}")
	for _, n := range c.Nodes {
		add(n.Address.String(), port)
		if n.Second.IsValid() {
			add(n.Second.String(), port)
		}
	}
	return at
}

type pod struct {
	name string
	ips  []netip.Addr
}

// ready are the ready web pods.
func ready(c *e2etest.Cluster) (all []pod, err error) {
	out, err := c.Try("get", "pods", "-l", "app=web", "-o", "json")
	if err != nil {
		return nil, err
	}
	var list struct {
		Items []struct {
			Metadata struct{ Name string }
			Status   struct {
				PodIPs     []struct{ IP netip.Addr }
				Conditions []struct{ Type, Status string }
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, err
	}
	for _, p := range list.Items {
		own := pod{name: p.Metadata.Name}
		for _, ip := range p.Status.PodIPs {
			own.ips = append(own.ips, ip.IP)
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == "Ready" && condition.Status == "True" {
				all = append(all, own)
			}
		}
	}
	return all, nil
}
