//go:build e2e

package e2etest

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	"github.com/garboard-os/garboard/config"
)

const (
	webBudget     = 60 * time.Second // for pods on a worker that has to pull their image first
	serviceBudget = 20 * time.Second // for kube-proxy and DNS to know them
)

// webs is a server on each node, which listens at addresses of both families. It is its own client: the image has no
// shell.
const webs = `
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

// Web runs a server on each node, with a Service of all families that the cluster has.
func (c *Cluster) Web() {
	c.t.Helper()
	c.Apply(strings.ReplaceAll(webs, "IMAGE", config.DefaultAPIServerImage))
}

// WebAnswers waits until all servers of Web are ready, and asks each at all places at which it serves, from each of
// them. It returns how many places there are.
func (c *Cluster) WebAnswers() int {
	c.t.Helper()
	first, families := c.Nodes[0].Address, 1
	if c.Nodes[0].Second.IsValid() {
		families = 2
	}
	var pods []server
	c.Eventually(webBudget, "a web pod is ready on each node, with an address of each family", func() (err error) {
		if pods, err = c.servers(); err != nil {
			return err
		}
		for _, p := range pods {
			if len(p.ips) != families || p.ips[0].Is4() != first.Is4() {
				c.t.Fatalf("addresses of %s: %v", p.name, p.ips)
			}
		}
		if len(pods) != len(c.Nodes) {
			err = fmt.Errorf("ready are %v", pods)
		}
		return err
	})
	at := c.places(pods)
	for _, from := range pods {
		if log := c.Kubectl("logs", from.name); !strings.Contains(log, "Starting to serve") {
			c.t.Errorf("log of %s: %q", from.name, log)
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
	return len(at)
}

// places are all places at which the pods serve: their own addresses, those of the Service, its name, and its port on
// each node.
func (c *Cluster) places(pods []server) []string {
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

type server struct {
	name string
	ips  []netip.Addr
}

// servers are the ready web pods.
func (c *Cluster) servers() (all []server, err error) {
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
		own := server{name: p.Metadata.Name}
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
