package main

import (
	"context"
	"fmt"
	"maps"

	"github.com/garboard-os/garboard/image/components/podcheckpointer/checkpoint"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"
)

// newAPIServer reads a kubeconfig with a client certificate. It speaks HTTP/1: after a timeout
// the connection is closed, and the next request may reach another API server.
func newAPIServer(path string) (client.CoreV1Interface, error) {
	access, err := clientcmd.BuildConfigFromFlags("", path)
	if err != nil {
		return nil, err
	}
	access.Timeout, access.NextProtos = timeout, []string{"http/1.1"}
	return client.NewForConfig(access)
}

// parents returns the pods of the node that are to have a checkpoint.
func (p *program) parents(ctx context.Context) (parents []*core.Pod, err error) {
	if p.api == nil {
		if p.api, err = newAPIServer(p.kubeconfig); err != nil {
			return nil, err
		}
	}
	list, err := p.api.Pods("").List(ctx, meta.ListOptions{FieldSelector: "spec.nodeName=" + p.node})
	if err != nil {
		return nil, err
	}
	for i := range list.Items {
		if pod := &list.Items[i]; checkpoint.IsParent(pod) {
			parents = append(parents, pod)
		}
	}
	return parents, nil
}

// files returns the files of a Secret or a ConfigMap, by name.
func (p *program) files(ctx context.Context, namespace string, s checkpoint.Source) (map[string][]byte, error) {
	values := map[string][]byte{}
	var err error
	if s.Kind == "secrets" {
		var secret *core.Secret
		if secret, err = p.api.Secrets(namespace).Get(ctx, s.Name, meta.GetOptions{}); err == nil {
			values = secret.Data
		}
	} else {
		var settings *core.ConfigMap
		if settings, err = p.api.ConfigMaps(namespace).Get(ctx, s.Name, meta.GetOptions{}); err == nil {
			for key, value := range settings.Data {
				values[key] = []byte(value)
			}
			maps.Copy(values, settings.BinaryData)
		}
	}
	if errors.IsNotFound(err) && s.Optional {
		return nil, nil
	}
	if err == nil {
		values, err = s.Files(values)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", s.Kind, s.Name, err)
	}
	return values, nil
}
